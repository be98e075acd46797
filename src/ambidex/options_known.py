"""The long tail of the option table: names from ten releases of vLLM, from other engines and from
guides, each with why it has no effect here, or why it is refused and what to use instead.
"""

from __future__ import annotations

from typing import Any

from ambidex.option_types import NO_EFFECT, REFUSED, Option


def no_effect(names: str, reason: str, type: str = "any", **more: Any) -> tuple[Option, ...]:
    """Options without effect. A name may carry its short form: ``--compilation-config|-cc``."""
    return tuple(_row(name, NO_EFFECT, reason, type, more) for name in names.split())


def refused(
    names: str, reason: str, replacement: str, type: str = "any", **more: Any
) -> tuple[Option, ...]:
    more["replacement"] = replacement
    return tuple(_row(name, REFUSED, reason, type, more) for name in names.split())


def _row(name: str, kind: str, reason: str, type: str, more: dict[str, Any]) -> Option:
    first, *aliases = name.split("|")
    return Option(first, kind, type, reason=reason, aliases=tuple(aliases), **more)


ONE = "one process computes, there is nothing to share out"
_PARALLEL = (
    "computing on several devices is not built yet",
    "Use 1 (or leave it out): the CPU lane runs the whole model with all cores.",
)
GRAPH = "one recorded step serves every batch, there is nothing to compile or capture"
KERNELS = "the processor's instruction set decides which kernels run"
_SPEC = (
    "speculative decoding is not built yet",
    "Leave it out: greedy answers are the same without it, and sampled ones follow the same "
    "distribution.",
)
_LORA = (
    "LoRA is not built yet",
    "Merge the adapter into the weights, and serve the merged folder.",
)
_LORA_LIMIT = "it only matters with --enable-lora"
IMAGES = "models see text only, a request with images, audio or video gets a 400"
_IMAGES_NO = ("inputs other than text are not built yet", "Send text only, and leave it out.")
_QUANT = (
    "settings of a quantisation are read from the checkpoint only",
    "Leave it out: --quantization int8 or int4 quantises while loading.",
)
_TOOLS = (
    "parsing tool calls and reasoning out of answers is not built yet",
    "Leave it out: the template still gets `tools`, and the answer comes as text.",
)
STRUCTURED = "structured output is not built yet, a request that asks for it gets a 400"
_POOL = ("only text generation is built", "Use --task generate, or leave it out.")
_CODE = ("code from outside is never loaded", "Leave it out.")
_MAMBA = "models with a Mamba state are not supported, so there is none to cache"
TRACING = "traces are not exported, /metrics has the figures"
ALWAYS_PROCESS = "the HTTP server and the engine are always two processes"
_KV_SCALES = "a KV cache in int8 takes its scales from each token"
_KV_REMOTE = ("moving KV between machines is not built yet", "Leave it out.")
_ONE_HOST = "one machine computes, there is no other rank to meet"
_ACCESS = "access lines show only with --uvicorn-log-level info"
_NO_OFFLOAD = "there is no accelerator to offload from"
_OTHER_ENGINE = "it is another engine's name"
MMAP = "weights are mapped from the file, one tensor at a time"

KNOWN_OPTIONS: tuple[Option, ...] = (
    # Several devices, several machines.
    *refused(
        "--tensor-parallel-size|-tp --pipeline-parallel-size|-pp --data-parallel-size|-dp "
        "--data-parallel-size-local|-dpl --decode-context-parallel-size|-dcp "
        "--prefill-context-parallel-size|-pcp --nnodes|-n",
        *_PARALLEL,
        "int",
        low=0,
        harmless=(0, 1),
        harmless_reason=ONE,
    ),
    *refused(
        "--data-parallel-rank|-dpn --data-parallel-start-rank|-dpr --node-rank|-r",
        *_PARALLEL,
        "int",
        harmless=(0,),
        harmless_reason=ONE,
    ),
    *refused(
        "--headless --data-parallel-hybrid-lb|-dph --data-parallel-external-lb|-dpe "
        "--data-parallel-multi-port-external-lb|-dpm --enable-elastic-ep",
        *_PARALLEL,
        "flag",
    ),
    *no_effect(
        "--distributed-executor-backend --dcp-comm-backend --dcp-kv-cache-interleave-size "
        "--cp-kv-cache-interleave-size --data-parallel-address|-dpa --data-parallel-rpc-port|-dpp "
        "--data-parallel-backend|-dpb --data-parallel-supervisor-port "
        "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s "
        "--dp-supervisor-probe-failure-threshold --dp-sync-interval --all2all-backend "
        "--elastic-ep-max-dp-size --eplb-config --eplb-log-balancedness --eplb-step-interval "
        "--eplb-window-size --num-redundant-experts --expert-placement-strategy --ubatch-size "
        "--dbo-decode-token-threshold --dbo-prefill-token-threshold --api-server-count|-asc "
        "--max-parallel-loading-workers --tp-size --dp-size --pp-size",
        ONE,
    ),
    *no_effect(
        "--disable-custom-all-reduce --enable-expert-parallel|-ep --enable-eplb --enable-dbo "
        "--enable-hc-sp --enable-ep-weight-filter --enable-batch-sharded-sampling "
        "--dcp-q-replicate --disable-nccl-for-dp-synchronization --enable-nccl-comm-suspend "
        "--worker-use-ray --engine-use-ray --ray-workers-use-nsight --enable-scale-out "
        "--enable-multimodal-encoder-data-parallel --aggregate-engine-logging "
        "--enable-shm-tensor-arena",
        ONE,
        "flag",
    ),
    *no_effect(
        "--master-addr --master-port --distributed-timeout-seconds "
        "--cpu-distributed-timeout-seconds",
        _ONE_HOST,
    ),
    *no_effect(
        "--device-ids",
        "there is no accelerator to number",
        "list",
        with_accelerator={"reason": "--device names the one accelerator"},
    ),
    # Graphs, compilation, kernels.
    *no_effect(
        "--compilation-config|-cc|-O --optimization-level --performance-mode --kernel-config "
        "--ir-op-priority --additional-config",
        GRAPH,
        "json_or_str",
    ),
    *no_effect("--cudagraph-capture-sizes --cuda-graph-sizes", GRAPH, "list"),
    *no_effect(
        "--max-cudagraph-capture-size --max-seq-len-to-capture --max-context-len-to-capture "
        "--jit-monitor-mode",
        GRAPH,
    ),
    *no_effect("--cudagraph-metrics --jit-monitor-verbose --disable-cuda-graph", GRAPH, "flag"),
    *no_effect("--attention-config|-ac --engram-config", KERNELS, "json_or_str"),
    *no_effect(
        "--attention-backend --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend "
        "--override-attention-dtype",
        KERNELS,
    ),
    *no_effect(
        "--disable-cascade-attn --enable-flashinfer-autotune --monokernel --use-fp64-gumbel "
        "--enable-cumem-allocator --kv-sharing-fast-prefill --swa-bounded-replay",
        KERNELS,
        "flag",
    ),
    # The scheduler and the cache.
    *no_effect(
        "--use-v2-block-manager --use-v2-scheduler --disable-hybrid-kv-cache-manager "
        "--disable-async-output-proc --async-scheduling --multi-step-stream-outputs "
        "--scheduler-reserve-full-isl --long-prefill-token-threshold-adaptive "
        "--disable-chunked-mm-input",
        "there is one scheduler and one block manager, and they need no such switch",
        "flag",
    ),
    *no_effect(
        "--num-scheduler-steps --num-lookahead-slots --scheduler-delay-factor --max-paddings "
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--prefill-schedule-interval --stream-interval --watermark",
        "each step is scheduled anew, and its tokens are streamed at once",
    ),
    *no_effect("--preemption-mode", "a preempted request is recomputed"),
    *no_effect("--max-num-scheduled-tokens", "--max-num-batched-tokens is the limit of a step"),
    *refused(
        "--max-num-active-seqs",
        "there is one limit on running requests",
        "Use --max-num-seqs.",
    ),
    *refused(
        "--max-num-queued-reqs --max-num-queued-tokens",
        "a limit on waiting requests is not built yet",
        "Leave it out, or limit requests in a proxy in front.",
    ),
    *no_effect(
        "--prefix-caching-hash-algo --prefix-cache-retention-interval --prefix-match-unit",
        "the prefix cache hashes whole blocks with SHA-256",
    ),
    *no_effect("--calculate-kv-scales", _KV_SCALES, "flag"),
    *no_effect("--kv-cache-dtype-skip-layers", "all layers' KV has one type", "list"),
    *no_effect(
        "--mamba-backend --mamba-ssu-algorithm --mamba-cache-philox-rounds --mamba-cache-dtype "
        "--mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --replayssm-buffer-len "
        "--mamba-config",
        _MAMBA,
    ),
    *no_effect(
        "--enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint "
        "--use-replayssm",
        _MAMBA,
        "flag",
    ),
    *refused(
        "--disable-sliding-window",
        "a model's sliding window is part of what it computes",
        "Give --max-model-len no longer than the window instead: then nothing slides.",
        "flag",
    ),
    *no_effect(
        "--offload-backend --offload-group-size --offload-num-in-group",
        _NO_OFFLOAD,
        with_accelerator={"reason": "--offload-layers and --offload-mode say what goes, and how"},
    ),
    *no_effect(
        "--cpu-offload-params --offload-params",
        _NO_OFFLOAD,
        "list",
        with_accelerator={
            "kind": REFUSED,
            "reason": "weights to offload are named by --offload-layers",
            "replacement": "Use --offload-layers '*.NAME' for each NAME.",
        },
    ),
    *refused(
        "--scheduler-cls --worker-extension-cls --io-processor-plugin --tool-parser-plugin "
        "--reasoning-parser-plugin --logits-processor-pattern",
        *_CODE,
    ),
    *refused(
        "--worker-cls",
        *_CODE,
        harmless=("auto",),
        harmless_reason="there is one kind of worker",
    ),
    *refused("--logits-processors --middleware", *_CODE, "list"),
    *refused("--model-class-overrides", *_CODE, "json"),
    # Loading.
    *no_effect("--trust-remote-code", "code in a model folder is never run", "flag"),
    *no_effect("--code-revision", "code in a model folder is never run"),
    *no_effect(
        "--load-format",
        "the files themselves say what they are",
        refused_values={
            "dummy": "random weights are not built in. Give a real model.",
            **dict.fromkeys(
                ("tensorizer", "sharded_state", "runai*", "modelexpress*", "instanttensor"),
                "this format is not supported. Use safetensors, GGUF or a torch checkpoint.",
            ),
        },
    ),
    *no_effect(
        "--config-format",
        "config.json and GGUF headers are told apart by themselves",
        refused_values={
            "mistral": "Mistral's own format is not supported. Use a folder with a config.json."
        },
    ),
    *no_effect(
        "--safetensors-load-strategy --safetensors-prefetch-num-threads "
        "--safetensors-prefetch-block-size --model-loader-extra-config --pt-load-map-location",
        MMAP,
    ),
    *no_effect("--ignore-patterns", "only the files that a model needs are fetched", "list"),
    *no_effect("--use-tqdm-on-load", "a progress bar shows on a terminal, else none", "flag"),
    *no_effect("--model-impl", "each architecture has one implementation"),
    *refused(
        "--download-dir",
        "files from the hub stay in its own cache",
        "Set HF_HOME to another folder.",
    ),
    *refused(
        "--model-weights",
        "a model's files are in one place",
        "Give that folder or file as MODEL.",
    ),
    *refused(
        "--tokenizer-revision",
        "a revision of the tokenizer alone is not supported",
        "Use --revision for both, or give a local folder with --tokenizer.",
    ),
    *no_effect(
        "--tokenizer-mode",
        "the tokenizer is read from the model's files",
        refused_values={
            "mistral": "Mistral's tokenizer format is not supported. Use a folder with a "
            "tokenizer.json.",
            "custom": "code from outside is never loaded. Use a folder with a tokenizer.json.",
        },
    ),
    *refused(
        "--skip-tokenizer-init",
        "the server needs the tokenizer",
        "Leave it out: prompts as token ids work with it too.",
        "flag",
    ),
    *no_effect(
        "--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config "
        "--renderer-num-workers",
        "the HTTP process tokenises itself",
    ),
    *refused(
        "--hf-token",
        "a token on the command line can be seen by every user of the machine",
        "Set HF_TOKEN, or run `hf auth login`.",
        "optional",
        secret=True,
        harmless=(True,),
        harmless_reason="the hub's own login is used anyway",
    ),
    *refused("--quantization-config", *_QUANT, "json"),
    *no_effect("--quantization-param-path", _KV_SCALES),
    *no_effect("--allow-deprecated-quantization", "no deprecated format is supported", "flag"),
    *refused("--qlora-adapter-name-or-path", *_LORA),
    # LoRA and prompt adapters.
    *refused("--enable-lora --enable-prompt-adapter", *_LORA, "flag"),
    *refused("--lora-modules --prompt-adapters", *_LORA, "list"),
    *refused("--default-mm-loras", *_LORA, "json"),
    *no_effect(
        "--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-extra-vocab-size "
        "--long-lora-scaling-factors --max-lora-cls-labels --max-prompt-adapters "
        "--max-prompt-adapter-token",
        _LORA_LIMIT,
    ),
    *no_effect("--lora-target-modules", _LORA_LIMIT, "list"),
    *no_effect(
        "--fully-sharded-loras --enable-lora-bias --enable-tower-connector-lora "
        "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
        _LORA_LIMIT,
        "flag",
    ),
    # Speculative decoding.
    *refused("--speculative-config|-sc", *_SPEC, "json"),
    *refused("--speculative-model --spec-model --spec-method", *_SPEC),
    *refused(
        "--num-speculative-tokens --spec-tokens",
        *_SPEC,
        "int",
        harmless=(0,),
        harmless_reason="nothing is drafted",
    ),
    *no_effect(
        "--speculative-draft-tensor-parallel-size|-spec-draft-tp --speculative-max-model-len "
        "--speculative-model-quantization --speculative-disable-by-batch-size "
        "--spec-decoding-acceptance-method --typical-acceptance-sampler-posterior-threshold "
        "--typical-acceptance-sampler-posterior-alpha --ngram-prompt-lookup-max "
        "--ngram-prompt-lookup-min --per-request-spec-decode-metrics",
        "nothing is drafted",
    ),
    *no_effect(
        "--speculative-disable-mqa-scorer --disable-logprobs-during-spec-decoding",
        "nothing is drafted",
        "flag",
    ),
    # Images, audio, video.
    *no_effect(
        "--limit-mm-per-prompt --media-io-kwargs --mm-processor-kwargs",
        IMAGES,
        "json_or_str",
    ),
    *no_effect(
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm "
        "--mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend "
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
        "--mm-encoder-fp8-scale-save-margin --video-pruning-rate --video-pruning-method "
        "--mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --allowed-local-media-path "
        "--image-feature-size --image-input-shape --image-input-type --image-token-id "
        "--image-processor --image-processor-revision --ec-manager-config",
        IMAGES,
    ),
    *no_effect("--allowed-media-domains", IMAGES, "list"),
    *no_effect(
        "--language-model-only --interleave-mm-strings --skip-mm-profiling "
        "--mm-device-do-normalize --disable-mm-preprocessor-cache --trust-request-mm-kwargs "
        "--enable-mm-processor-stats --disable-image-processor",
        IMAGES,
        "flag",
    ),
    *refused("--mm-encoder-only --enable-mm-embeds --enable-prompt-embeds", *_IMAGES_NO, "flag"),
    # Tasks other than generating text.
    *refused(
        "--task --runner",
        *_POOL,
        harmless=("auto", "generate"),
        harmless_reason="generating text is the one task",
    ),
    *refused("--convert", *_POOL, harmless=("auto",), harmless_reason="nothing is converted"),
    *refused("--pooler-config --override-pooler-config", *_POOL, "json"),
    *no_effect("--enable-flash-late-interaction", "only text generation is built", "flag"),
    *refused("--omni --tokens-only", *_POOL, "flag"),
    *refused("--diffusion-config|-dc", *_POOL, "json"),
    # What is generated.
    *refused(
        "--override-generation-config",
        "overriding generation_config.json at start is not built yet",
        "Give the values with each request, or use --generation-config vllm.",
        "json",
    ),
    *refused(
        "--logprobs-mode",
        "logprobs are those of the unmodified distribution",
        "Use raw_logprobs, or leave it out.",
        harmless=("raw_logprobs",),
        harmless_reason="it is how logprobs are computed",
    ),
    *refused("--watermark-config", "watermarking is not built", "Leave it out.", "json"),
    *refused(
        "--enable-return-routed-experts --return-sampling-mask --return-tokens-as-token-ids "
        "--enable-trace-replay --enable-sleep-mode --enable-per-request-metrics",
        "this view of the engine is not built",
        "Leave it out.",
        "flag",
    ),
    *no_effect(
        "--sleep-mode-backend --sleep-preserve-parameter-names --aux-output-config",
        "it only matters with an option that is not built",
    ),
    *no_effect("--sleep-mode-offload-cudagraph", GRAPH, "flag"),
    *no_effect("--guided-decoding-backend --structured-outputs-config", STRUCTURED, "json_or_str"),
    *no_effect(
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
        "--guided-decoding-disable-additional-properties",
        STRUCTURED,
        "flag",
    ),
    *refused("--tool-call-parser --reasoning-parser --tool-server", *_TOOLS),
    *refused("--enable-auto-tool-choice --enable-reasoning", *_TOOLS, "flag"),
    *no_effect(
        "--exclude-tools-when-tool-choice-none --expand-tools-even-if-tool-choice-none "
        "--cohere-is-reasoning-model",
        "tool calls and reasoning are not parsed",
        "flag",
    ),
    *no_effect(
        "--tool-strict-level --reasoning-effort-map --reasoning-config --cohere-format "
        "--anthropic-disabled-thinking-effort",
        "tool calls and reasoning are not parsed",
        "json_or_str",
    ),
    *no_effect("--chat-template-content-format", "content parts of type text are joined"),
    *refused(
        "--default-chat-template-kwargs",
        "defaults for the template's variables are not built yet",
        "Set them at the top of a template of your own, with --chat-template.",
        "json",
    ),
    *refused(
        "--trust-request-chat-template",
        "a template in a request is never run",
        "Use --chat-template.",
        "flag",
    ),
    # The server.
    *refused("--uds", "a Unix socket is not supported", "Use --host and --port."),
    *refused("--grpc", "only HTTP is served", "Leave it out.", "flag"),
    *refused("--grpc-port", "only HTTP is served", "Leave it out."),
    *refused(
        "--ssl-ca-certs --ssl-ciphers",
        "client certificates and cipher lists are not supported",
        "Put a reverse proxy in front for them.",
    ),
    *refused(
        "--ssl-cert-reqs",
        "client certificates are not supported",
        "Put a reverse proxy in front for them.",
        "int",
        harmless=(0,),
        harmless_reason="clients need no certificate",
    ),
    *no_effect("--enable-ssl-refresh", "the certificate is read once, at start", "flag"),
    *refused(
        "--allow-credentials",
        "credentials across origins are not supported",
        "Send the key in the Authorization header.",
        "flag",
    ),
    *refused(
        "--allowed-methods --allowed-headers",
        "narrowing methods or headers across origins is not supported",
        "Use --allowed-origins alone, or a reverse proxy.",
        "list",
        harmless=(["*"],),
        harmless_reason="it is what --allowed-origins does",
    ),
    *no_effect(
        "--disable-frontend-multiprocessing",
        ALWAYS_PROCESS,
        "flag",
    ),
    *no_effect("--disable-uvicorn-access-log", _ACCESS, "flag"),
    *no_effect("--disable-access-log-for-endpoints", _ACCESS),
    *no_effect(
        "--disable-fastapi-docs --enable-offline-docs", "no pages of docs are served", "flag"
    ),
    *no_effect(
        "--enable-request-id-headers --enable-prompt-tokens-details --enable-server-load-tracking "
        "--enable-tokenizer-info-endpoint --log-error-stack",
        "what the server answers does not depend on it",
        "flag",
    ),
    *no_effect(
        "--enable-force-include-usage",
        "a stream has usage where the request's stream_options ask for it",
        "flag",
    ),
    *no_effect(
        "--sse-keep-alive-interval --fingerprint-mode --fingerprint-value",
        "what the server answers does not depend on it",
    ),
    *no_effect("--enable-log-outputs --enable-log-deltas", "answers are never logged", "flag"),
    *no_effect("--max-log-len", "prompts are logged only with --enable-log-requests"),
    *no_effect(
        "--log-config-file --logging-config",
        "logs are set by --log-level and --log-format",
    ),
    *no_effect(
        "--h11-max-header-count --h11-max-incomplete-event-size",
        "it belongs to another HTTP parser than the one in use",
    ),
    # Views, traces, care.
    *no_effect(
        "--otlp-traces-endpoint --collect-detailed-traces --profiler-config "
        "--show-hidden-metrics-for-version --kv-cache-metrics-sample --custom-histogram-buckets",
        TRACING,
        "list",
    ),
    *no_effect(
        "--kv-cache-metrics --enable-layerwise-nvtx-tracing --enable-mfu-metrics "
        "--enable-logging-iteration-details",
        TRACING,
        "flag",
    ),
    *no_effect("--enable-fault-tolerance", "a dead engine is always started again", "flag"),
    *no_effect(
        "--fault-tolerance-config --watchdog-config", "a dead engine is always started again"
    ),
    *no_effect("--fail-on-environ-validation", "unknown variables get one line each", "flag"),
    *refused("--kv-transfer-config --kv-events-config --ec-transfer-config", *_KV_REMOTE, "json"),
    *refused(
        "--weight-transfer-config",
        "replacing weights while serving is not built",
        "Start the server again with the new model.",
        "json",
    ),
    *no_effect(
        "--override-neuron-config --hpu-config", "there is no such device here", "json_or_str"
    ),
    # What belongs to a request, or to vLLM's client.
    *refused(
        "--max-tokens --temperature --top-p --top-k --min-p --repetition-penalty --stop",
        "it belongs to a request, not to the server",
        "Give it with each request.",
    ),
    *refused(
        "--url --model-name --system-prompt --quick",
        "it is an option of vLLM's client",
        "Use `ambidex chat`, or any OpenAI client.",
    ),
    *refused(
        "--stats", "it is an option of vLLM's client", "`ambidex run` prints its rates.", "flag"
    ),
    # Other engines' names for what works here.
    *refused("--model-path|-m --model-id --model-name-or-path", _OTHER_ENGINE, "Use --model."),
    *refused(
        "--ctx-size|-c --context-length --max-total-tokens --max-input-length --max-input-tokens",
        _OTHER_ENGINE,
        "Use --max-model-len.",
    ),
    *refused("--threads|-t --n-threads", _OTHER_ENGINE, "Use --cpu-threads."),
    *refused(
        "--max-running-requests --max-concurrent-requests --parallel|-np",
        _OTHER_ENGINE,
        "Use --max-num-seqs.",
    ),
    *refused(
        "--chunked-prefill-size --max-batch-prefill-tokens --batch-size|-b",
        _OTHER_ENGINE,
        "Use --max-num-batched-tokens.",
    ),
    *refused("--page-size", _OTHER_ENGINE, "Use --block-size."),
    *refused("--disable-radix-cache", _OTHER_ENGINE, "Use --no-enable-prefix-caching.", "flag"),
    *no_effect(
        "--n-gpu-layers|-ngl|--gpu-layers --mem-fraction-static",
        "there is no accelerator, the CPU holds every layer",
        with_accelerator={
            "reason": "--cpu-offload-gb or --offload-layers say which weights stay with the CPU, "
            "--gpu-memory-utilization how much memory is taken"
        },
    ),
)
