"""The table of options.

``options_accelerator.py`` holds what needs an accelerator, ``options_known.py`` and
``options_variables.py`` the long tail. One row says everything about an option.
"""

from __future__ import annotations

from ambidex.option_types import WORKS, Option
from ambidex.options_accelerator import ACCELERATOR, ACCELERATOR_OPTIONS, HARDWARE_OPTIONS
from ambidex.options_known import KNOWN_OPTIONS
from ambidex.options_variables import KNOWN_VARIABLES

MODEL = "Model"
MEMORY = "KV cache and batching"
COMPUTE = "Compute"
LOGS = "Logs"
SERVER = "Server"
OTHER = "Other"
ENVIRONMENT = "Environment"

#: In the order of ``--help``.
GROUPS = (MODEL, MEMORY, COMPUTE, ACCELERATOR, LOGS, SERVER, OTHER)

_FLOATS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16"}
_FLOATS |= {"float": "float32", "fp32": "float32"}
_KV_QUANTISED = (
    "the KV cache is not kept in this type. Use --kv-cache-dtype bfloat16 or int8, or give fewer "
    "tokens with --max-model-len."
)
_QUANTISED = (
    "this form of weights is not supported. Use a GGUF file, an AWQ, GPTQ or bitsandbytes "
    "checkpoint, or an unquantised checkpoint with --quantization int8 or int4."
)
_QUANTISED_FORMS = (
    "*fp8* *fp4* *mxfp* modelopt* compressed-tensors torchao* quark* hqq* experts_int8 tpu_int8 "
    "auto-round inc ipex marlin gptq_marlin_24 *bitblas moe_wna16 rtn aqlm squeezellm deepspeedfp "
    "fp_quant petit_nvfp4 int8_* w8a8* w4a16*"
)

_MODEL_OPTIONS = (
    Option(
        "--model",
        WORKS,
        dest="model",
        group=MODEL,
        aliases=("--model-tag",),
        default_help="the positional MODEL",
        help="Folder, GGUF file, alias or hub id (org/name[:file]).",
    ),
    Option(
        "--tokenizer",
        WORKS,
        dest="tokenizer",
        group=MODEL,
        default_help="the model's own",
        help="Folder or hub id of another tokenizer.",
    ),
    Option(
        "--dtype",
        WORKS,
        dest="dtype",
        default="auto",
        group=MODEL,
        choices=("auto", "float32", "float16", "bfloat16", "half", "float"),
        normal=_FLOATS,
        help="Type of the weights in memory: auto, half, float16, bfloat16, float32.",
    ),
    Option(
        "--quantization",
        WORKS,
        dest="quantization",
        aliases=("-q",),
        group=MODEL,
        default_help="what the files are",
        choices=("int8", "int4", "awq", "bitsandbytes", "gguf", "gptq"),
        normal={
            **dict.fromkeys(("none", "null", "auto", ""), None),
            "awq_marlin": "awq",
            "gptq_marlin": "gptq",
            "bnb": "bitsandbytes",
        },
        refused_values=dict.fromkeys(_QUANTISED_FORMS.split(), _QUANTISED),
        help="int8 or int4: quantise while loading; awq, gptq ...: what the files must be.",
    ),
    Option(
        "--quantization-cache",
        WORKS,
        type="flag",
        dest="quantization_cache",
        default=False,
        group=MODEL,
        help="Keep on disk what --quantization int8 or int4 makes, for the next start.",
    ),
    Option(
        "--max-model-len",
        WORKS,
        type="context",
        dest="max_model_len",
        default="auto",
        low=1,
        unit="tokens",
        group=MODEL,
        help="Longest prompt plus answer: 8192, 8k, 1M, auto, or auto:131072 (a cap).",
    ),
    Option(
        "--hf-overrides",
        WORKS,
        type="json",
        dest="hf_overrides",
        group=MODEL,
        default_help="none",
        help="JSON object that replaces fields of config.json; also --hf-overrides.field VALUE.",
    ),
    Option(
        "--hf-config-path",
        WORKS,
        dest="hf_config_path",
        group=MODEL,
        default_help="the model's own",
        help="Folder whose config.json replaces the model's.",
    ),
    Option(
        "--rope-scaling",
        WORKS,
        type="json",
        dest="rope_scaling",
        group=MODEL,
        default_help="the model's own",
        help="JSON object for config.json's rope_scaling.",
    ),
    Option(
        "--rope-theta",
        WORKS,
        type="float",
        dest="rope_theta",
        low=1,
        group=MODEL,
        default_help="the model's own",
        help="Base of the rotary embedding.",
    ),
    Option(
        "--revision",
        WORKS,
        dest="revision",
        group=MODEL,
        default_help="main",
        help="Branch, tag or commit of a hub id.",
    ),
    Option(
        "--served-model-name",
        WORKS,
        type="list",
        dest="served_model_names",
        group=MODEL,
        default_help="MODEL as given",
        help="Names in the API; the first is the one in answers and metrics.",
    ),
    Option(
        "--chat-template",
        WORKS,
        dest="chat_template",
        group=MODEL,
        default_help="the model's own",
        help="Jinja chat template: a file, or the text itself.",
    ),
    Option(
        "--generation-config",
        WORKS,
        dest="generation_config",
        default="auto",
        group=MODEL,
        choices=("auto", "vllm"),
        refused_values={
            "*[/.]*": "a folder with another generation_config.json is not supported yet. Use "
            "auto (the model's) or vllm (none), and give values with each request."
        },
        help="Sampling defaults: auto (the model's generation_config.json) or vllm (none).",
    ),
    Option(
        "--seed",
        WORKS,
        type="int",
        dest="seed",
        low=-(2**63),
        high=2**63 - 1,
        group=MODEL,
        default_help="random",
        help="Base seed for requests that give none.",
    ),
    Option(
        "--max-logprobs",
        WORKS,
        type="count",
        dest="max_logprobs",
        default=20,
        low=-1,
        high=1_000_000,
        unit="-1: no limit",
        group=MODEL,
        help="Most logprobs that a request may ask for.",
    ),
)

_MEMORY_OPTIONS = (
    Option(
        "--max-num-seqs",
        WORKS,
        type="count",
        dest="max_num_seqs",
        default=128,
        low=1,
        unit="requests",
        group=MEMORY,
        help="Most requests in one step.",
    ),
    Option(
        "--max-num-batched-tokens",
        WORKS,
        type="count",
        dest="max_num_batched_tokens",
        default=2048,
        low=1,
        unit="tokens",
        group=MEMORY,
        help="Most tokens in one step, prompt and output alike.",
    ),
    Option(
        "--enable-chunked-prefill",
        WORKS,
        type="flag",
        dest="enable_chunked_prefill",
        default=True,
        group=MEMORY,
        help="Cut long prompts into pieces that share steps with decodes.",
    ),
    Option(
        "--scheduling-policy",
        WORKS,
        dest="scheduling_policy",
        default="fcfs",
        choices=("fcfs", "priority"),
        group=MEMORY,
        help="fcfs, or priority (a lower number runs first).",
    ),
    Option(
        "--block-size",
        WORKS,
        type="int",
        dest="block_size",
        default=16,
        choices=(8, 16, 32, 64, 128),
        group=MEMORY,
        help="Tokens per KV block: 8, 16, 32, 64 or 128.",
    ),
    Option(
        "--enable-prefix-caching",
        WORKS,
        type="flag",
        dest="enable_prefix_caching",
        default=True,
        group=MEMORY,
        help="Reuse the KV of a prompt's beginning that was seen before.",
    ),
    Option(
        "--kv-cache-dtype",
        WORKS,
        dest="kv_cache_dtype",
        default="auto",
        group=MEMORY,
        choices=("auto", "float32", "float16", "bfloat16", "int8", "half", "float"),
        normal=_FLOATS,
        refused_values={
            "*fp8*": _KV_QUANTISED,
            "*int4*": _KV_QUANTISED,
            "int8_*": _KV_QUANTISED,
            "*fp4*": _KV_QUANTISED,
            "turboquant*": _KV_QUANTISED,
        },
        help="Type of the KV cache: auto (the model's), float32, float16, bfloat16, int8.",
    ),
    Option(
        "--kv-cache-memory-bytes",
        WORKS,
        type="size",
        dest="kv_cache_bytes",
        low=1,
        unit="bytes",
        group=MEMORY,
        aliases=("--kv-cache-memory",),
        default_help="from the free memory",
        help="Size of the KV cache: 8GiB, 40GB.",
    ),
    Option(
        "--num-gpu-blocks-override",
        WORKS,
        type="count",
        dest="num_blocks",
        low=1,
        unit="blocks",
        group=MEMORY,
        aliases=("--num-cpu-blocks",),
        default_help="from the free memory",
        help="Number of KV blocks, instead of a size.",
    ),
    Option(
        "VLLM_CPU_KVCACHE_SPACE",
        WORKS,
        type="gib",
        dest="kv_cache_bytes",
        low=0,
        unit="GiB, 0: from the free memory",
        group=ENVIRONMENT,
        help="Size of the KV cache in GiB (0: from the free memory).",
    ),
)

_COMPUTE_OPTIONS = (
    Option(
        "--cpu-threads",
        WORKS,
        type="threads",
        dest="cpu_threads",
        low=1,
        high=1024,
        unit="threads",
        group=COMPUTE,
        env=("AMBIDEX_CPU_THREADS", "OMP_NUM_THREADS"),
        default_help="one per core of this process",
        help="Compute threads.",
    ),
    Option(
        "--cpu-bind",
        WORKS,
        type="cpu_bind",
        dest="cpu_bind",
        group=COMPUTE,
        env=("AMBIDEX_CPU_BIND", "VLLM_CPU_OMP_THREADS_BIND"),
        default_help="auto",
        help="Cores of the compute threads: 0-15, 0,2,4, numa:0, auto or none.",
    ),
    Option(
        "--enforce-eager",
        WORKS,
        "flag",
        dest="enforce_eager",
        default=False,
        group=COMPUTE,
        help="Compute each step call by call instead of replaying a recorded one.",
    ),
)

_LOG_OPTIONS = (
    Option(
        "--log-level",
        WORKS,
        dest="log_level",
        default="INFO",
        group=LOGS,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        normal={"warn": "WARNING", "critical": "ERROR", "fatal": "ERROR", "trace": "DEBUG"},
        env=("AMBIDEX_LOG_LEVEL", "VLLM_LOGGING_LEVEL"),
        help="DEBUG, INFO, WARNING or ERROR; DEBUG shows each step's tokens.",
    ),
    Option(
        "--log-format",
        WORKS,
        dest="log_format",
        default="text",
        choices=("text", "json"),
        group=LOGS,
        env=("AMBIDEX_LOG_FORMAT",),
        help="text or json, one line per event on stderr.",
    ),
    Option(
        "--enable-log-requests",
        WORKS,
        type="flag",
        dest="enable_log_requests",
        default=False,
        group=LOGS,
        help="Log prompts and parameters of requests.",
    ),
    Option(
        "--disable-log-requests",
        WORKS,
        type="flag",
        dest="enable_log_requests",
        inverted=True,
        help="The opposite of --enable-log-requests.",
    ),
    Option(
        "--disable-log-stats",
        WORKS,
        type="flag",
        dest="disable_log_stats",
        default=False,
        group=LOGS,
        help="No line of statistics every few seconds.",
    ),
    Option(
        "--uvicorn-log-level",
        WORKS,
        dest="uvicorn_log_level",
        default="warning",
        group=LOGS,
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="Level of uvicorn's own messages; --log-level decides about the requests.",
    ),
)

_SERVER_OPTIONS = (
    Option(
        "--host",
        WORKS,
        dest="host",
        default="127.0.0.1",
        group=SERVER,
        help="Address to listen on; 0.0.0.0 opens it to other machines.",
    ),
    Option(
        "--port",
        WORKS,
        type="int",
        dest="port",
        default=8000,
        low=0,
        high=65535,
        unit="0 picks a free port",
        group=SERVER,
        help="Port to listen on; 0 picks a free one.",
    ),
    Option(
        "--api-key",
        WORKS,
        type="list",
        dest="api_keys",
        secret=True,
        group=SERVER,
        default_help="none",
        env=("AMBIDEX_API_KEY", "VLLM_API_KEY"),
        help="Keys, one of which a client must send.",
    ),
    Option(
        "--admin-api-key",
        WORKS,
        type="list",
        dest="admin_api_keys",
        secret=True,
        group=SERVER,
        env=("AMBIDEX_ADMIN_API_KEY",),
        default_help="inner views from this machine only",
        help="Keys for the inner views.",
    ),
    Option(
        "--allowed-origins",
        WORKS,
        type="list",
        dest="allowed_origins",
        group=SERVER,
        default_help="none, CORS is off",
        help="Web origins that may call the API.",
    ),
    Option(
        "--ssl-certfile",
        WORKS,
        dest="ssl_certfile",
        group=SERVER,
        default_help="plain HTTP",
        help="Certificate chain, PEM.",
    ),
    Option(
        "--ssl-keyfile",
        WORKS,
        dest="ssl_keyfile",
        group=SERVER,
        default_help="in the certificate's file",
        help="Private key of the certificate, PEM.",
    ),
    Option(
        "--root-path",
        WORKS,
        dest="root_path",
        default="",
        default_help="none",
        group=SERVER,
        help="Path under which a proxy serves the API.",
    ),
    Option(
        "--response-role",
        WORKS,
        dest="response_role",
        default="assistant",
        group=SERVER,
        help="Role of the answer in a chat.",
    ),
    Option(
        "--max-body-size",
        WORKS,
        type="size",
        dest="max_body_bytes",
        default=32 * 1024 * 1024,
        default_help="32MiB",
        low=1024,
        unit="bytes",
        group=SERVER,
        aliases=("--max-body-bytes",),
        env=("VLLM_HTTP_MAX_REQUEST_BODY_SIZE",),
        help="Largest request body: 32MiB.",
    ),
    Option(
        "--shutdown-timeout",
        WORKS,
        type="float",
        dest="shutdown_timeout_s",
        default=25.0,
        low=0,
        high=86_400,
        unit="seconds",
        group=SERVER,
        help="Seconds that running requests get after SIGTERM.",
    ),
)

_OTHER_OPTIONS = (
    Option(
        "--config",
        WORKS,
        dest="config",
        group=OTHER,
        default_help="none",
        help="YAML file of options; a folder with a config.json means the model's configuration.",
    ),
    Option(
        "--print-config",
        WORKS,
        type="flag",
        dest="print_config",
        default=False,
        group=OTHER,
        no_form=False,
        help="Show each value and where it comes from, then stop.",
    ),
    Option(
        "--help",
        WORKS,
        type="flag",
        dest="help",
        default=False,
        group=OTHER,
        no_form=False,
        aliases=("-h",),
        help="Show this text; --help-all adds what has no effect or is refused.",
    ),
    Option(
        "--help-all",
        WORKS,
        type="flag",
        dest="help_all",
        default=False,
        no_form=False,
        help="Show every known option.",
    ),
    Option(
        "--version",
        WORKS,
        type="flag",
        dest="version",
        default=False,
        no_form=False,
        aliases=("-v",),
        help="Show the version.",
    ),
)


#: Every known option and variable, working ones first; a name occurs once (a test checks it).
OPTIONS: tuple[Option, ...] = (
    *_MODEL_OPTIONS,
    *_MEMORY_OPTIONS,
    *_COMPUTE_OPTIONS,
    *ACCELERATOR_OPTIONS,
    *_LOG_OPTIONS,
    *_SERVER_OPTIONS,
    *_OTHER_OPTIONS,
    *HARDWARE_OPTIONS,
    *KNOWN_OPTIONS,
    *KNOWN_VARIABLES,
)
