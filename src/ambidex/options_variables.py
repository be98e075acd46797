"""The environment variables of vLLM, of its neighbours and ours, beside those that give an option
its value. A ``*`` at the end stands for every variable that begins so.
"""

from __future__ import annotations

from ambidex.option_types import WORKS, Option
from ambidex.options_known import (
    ALWAYS_PROCESS,
    GRAPH,
    IMAGES,
    KERNELS,
    MMAP,
    ONE,
    STRUCTURED,
    TRACING,
    no_effect,
    refused,
)

_ACCELERATOR = "there is no accelerator"
_BUILD = "it matters only while vLLM itself is built, packaged or tested"
_FIXED = "the limit is fixed"
_CPU_BACKEND = "it chooses among kernels of vLLM's CPU backend"

#: The libraries below us read these themselves.
_LIBRARIES = (
    *("OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC", "KMP_*", "GOMP_*"),
    *("MKL_*", "OPENBLAS_*", "LD_PRELOAD", "MALLOC_*", "TOKENIZERS_PARALLELISM"),
    *("RAYON_NUM_THREADS", "HF_*", "XDG_CACHE_HOME", "PYTHON*", "TMPDIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    # PyTorch sets this one by itself.
    "TORCHINDUCTOR_CACHE_DIR",
)

KNOWN_VARIABLES: tuple[Option, ...] = (
    # Read elsewhere in Ambidex, or by the libraries themselves.
    Option("AMBIDEX_CACHE", WORKS, help="Folder of pulled models (else below XDG_CACHE_HOME)."),
    Option(
        "AMBIDEX_CPU_KERNELS",
        WORKS,
        default="native",
        help="native or reference: which kernels the CPU lane runs.",
        choices=("native", "reference"),
    ),
    Option(
        "AMBIDEX_CPU_LEVEL",
        WORKS,
        default_help="the best that was tested",
        help="Instruction-set level of the native kernels: generic, v3, v4, v4_vnni or amx.",
    ),
    Option("AMBIDEX_NATIVE_DIR", WORKS, help="Folder with another build of the native kernels."),
    Option("AMBIDEX_TORCH", WORKS, help="cpu, default or skip: which torch the set-up installs."),
    Option("HF_HOME", WORKS, help="Folder of the hub's files."),
    Option("HF_HUB_OFFLINE", WORKS, help="1: no connection to the hub is opened."),
    Option("HF_TOKEN", WORKS, secret=True, help="Token for models that need a login."),
    Option("NO_COLOR", WORKS, help="Any value: no colours."),
    *(Option(name, WORKS, quiet=True) for name in _LIBRARIES),
    # Device and build.
    *no_effect("VLLM_TARGET_DEVICE", "--device says where the model computes"),
    *no_effect("VLLM_WORKER_MULTIPROC_METHOD", "processes are always spawned"),
    *no_effect("VLLM_ENABLE_V1_MULTIPROCESSING", ALWAYS_PROCESS),
    *no_effect(
        "CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_* VLLM_DOCKER_BUILD_CONTEXT "
        "VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED* VLLM_INSTALL_PUNICA_KERNELS "
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TEST_* "
        "VLLM_CI_USE_S3 VLLM_USE_RUST_BENCH S3_* LOCAL_RANK CUDA_HOME CUDA_PATH ROCM_PATH "
        "TORCH_CUDA_ARCH_LIST LD_LIBRARY_PATH FORCE_COLOR NVIDIA_* NCCL_VERSION CUDA_VERSION",
        _BUILD,
        quiet=True,
    ),
    *no_effect(
        "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING "
        "CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF "
        "PYTORCH_HIP_ALLOC_CONF HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
        "ASCEND_RT_VISIBLE_DEVICES HABANA_VISIBLE_DEVICES NVTE_* CUBLAS_* VLLM_CUDA* "
        "VLLM_ENABLE_CUDA* VLLM_GPU_* VLLM_NIC_SELECTION_VARS VLLM_WSL2_ENABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_* VLLM_MEMORY_PROFILER_* VLLM_ROCM_* VLLM_XPU_* VLLM_TPU_* "
        "VLLM_XLA_* VLLM_HPU_* VLLM_OPENVINO_* VLLM_NEURON_* VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH "
        "VLLM_USE_CUDNN_PREFILL VLLM_USE_AITER* VLLM_MARLIN_* VLLM_SKIP_P2P_CHECK "
        "VLLM_DEBUG_WORKSPACE HPU_* PT_HPU_* HABANA_* SAFETENSORS_FAST_GPU",
        _ACCELERATOR,
        with_accelerator={
            "reason": "it is read by libraries of other accelerators than those here"
        },
    ),
    # Several devices and machines.
    *no_effect(
        "NCCL_* GLOO_* UCX_* TP_SOCKET_IFNAME MASTER_ADDR MASTER_PORT WORLD_SIZE RANK RAY_* "
        "VLLM_NCCL_* VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_* VLLM_DP_* VLLM_RAY_* "
        "VLLM_USE_RAY_* VLLM_PP_LAYER_PARTITION VLLM_ALL2ALL_BACKEND VLLM_ALLREDUCE_* "
        "VLLM_DEEPEP* VLLM_DISABLE_PYNCCL VLLM_DISABLE_NCCL_FOR_DP_SYNCHRONIZATION "
        "VLLM_USE_NCCL_SYMM_MEM VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_MOE_DP_CHUNK_SIZE "
        "VLLM_ENABLE_MOE_DP_CHUNK VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_USE_DIRECT_DCP_* "
        "VLLM_ELASTIC_EP_* VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_REPLICATE_EMBED "
        "VLLM_ENABLE_GEMM_RS VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_MQ_MAX_CHUNK_BYTES_MB "
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
        "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "VLLM_HEAD_NODE_IP VLLM_LOCAL_RANK",
        ONE,
    ),
    *no_effect(
        "VLLM_NIXL_* VLLM_MOONCAKE_* MOONCAKE_* VLLM_P2P_* VLLM_EC_* LMCACHE_* "
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_* VLLM_USE_SIMPLE_KV_OFFLOAD",
        "KV is not moved between machines or tiers yet",
    ),
    # Kernels, graphs, compilation.
    *no_effect(
        "VLLM_ATTENTION_BACKEND VLLM_FLASH_ATTN_* VLLM_FLASHINFER_* VLLM_USE_FLASHINFER_* "
        "VLLM_HAS_FLASHINFER_CUBIN VLLM_DISABLE_FLASHINFER_PREFILL "
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_USE_TRITON_* VLLM_TRITON_* TRITON_* "
        "VLLM_USE_DEEP_GEMM* VLLM_MOE_* VLLM_SKIP_DEEP_GEMM_WARMUP VLLM_DEEP_GEMM_WARMUP "
        "VLLM_USE_TRTLLM_* VLLM_USE_FBGEMM VLLM_USE_OINK_OPS VLLM_ENABLE_HPC_OPS VLLM_MLA_* "
        "VLLM_FUSED_MOE_CHUNK_SIZE VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING "
        "VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON VLLM_USE_FUSED_MOE_GROUPED_TOPK "
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_DISABLE_SHARED_EXPERTS_STREAM "
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_DISABLE_DSV4_* VLLM_KIMI_* "
        "VLLM_COHERE2_* VLLM_STEP5_* VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_HUMMING_* "
        "VLLM_MXFP4_* VLLM_MXFP8_* VLLM_NVFP4_* VLLM_USE_NVFP4_CT_EMULATIONS VLLM_B12X_* "
        "VLLM_QUARK_* VLLM_GDN_DECODE_KERNEL VLLM_ENABLE_FLA_* VLLM_SSM_CONV_STATE_LAYOUT "
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TUNED_CONFIG_FOLDER VLLM_DISABLED_KERNELS "
        "VLLM_USE_HW_AGNOSTIC VLLM_USE_SPINLOOP_EXT VLLM_V1_USE_PREFILL_DECODE_ATTENTION "
        "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_KV_CACHE_LAYOUT "
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN K_SCALE_CONSTANT Q_SCALE_CONSTANT "
        "V_SCALE_CONSTANT VLLM_FLOAT32_MATMUL_PRECISION VLLM_LORA_DISABLE_PDL "
        "VLLM_LORA_ENABLE_DUAL_STREAM FLASHINFER_* DG_*",
        KERNELS,
    ),
    *no_effect(
        "VLLM_TORCH_COMPILE_LEVEL VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_* VLLM_USE_AOT_COMPILE "
        "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_FORCE_AOT_LOAD VLLM_USE_STANDALONE_COMPILE "
        "VLLM_USE_BYTECODE_HOOK VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_DISABLE_PAD_FOR_CUDAGRAPH "
        "VLLM_ENABLE_INDUCTOR_* VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_PATTERN_MATCH_DEBUG VLLM_USE_LAYERNAME TORCHINDUCTOR_* TORCH_COMPILE_DISABLE "
        "TORCHDYNAMO_*",
        GRAPH,
    ),
    *no_effect(
        "VLLM_CPU_SGL_KERNEL VLLM_CPU_MOE_PREPACK VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 "
        "VLLM_CPU_CI_ENV VLLM_ZENTORCH_WEIGHT_PREPACK",
        _CPU_BACKEND,
    ),
    *no_effect("VLLM_CPU_NUM_OF_RESERVED_CPU", "--cpu-threads says how many cores compute"),
    *no_effect("VLLM_BATCH_INVARIANT", "results never depend on the batch, it is always so"),
    # The engine.
    *no_effect(
        "VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
        "VLLM_SLEEP_WHEN_IDLE VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ENGINE_READY_TIMEOUT_S "
        "VLLM_INSTANCE_ID VLLM_PROCESS_NAME_PREFIX VLLM_SYSTEM_START_DATE "
        "VLLM_LOGITS_PROCESSOR_THREADS VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "there is one engine, which needs no such setting",
    ),
    *no_effect(
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY",
        "a dead engine is started again",
    ),
    *no_effect(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "a longer context needs rope scaling, which --hf-overrides gives",
    ),
    *no_effect("VLLM_ALLOW_INSECURE_SERIALIZATION", "nothing is pickled"),
    *no_effect("VLLM_PLUGINS VLLM_MEDIA_CONNECTOR", "code from outside is never loaded"),
    *no_effect("VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_*", "LoRA is not built yet"),
    *no_effect("VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS", "there is no such check"),
    *no_effect(
        "VLLM_V0_USE_OUTLINES_CACHE VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB "
        "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
        STRUCTURED,
    ),
    # Loading and folders.
    *refused(
        "VLLM_USE_MODELSCOPE",
        "models come from the Hugging Face hub or from disk",
        "Unset it, or give a local folder as MODEL.",
        "flag",
    ),
    *refused(
        "VLLM_MODEL_REDIRECT_PATH",
        "a table of redirects is not supported",
        "Unset it, and give the local folder as MODEL.",
        "str",
    ),
    *no_effect("VLLM_CACHE_ROOT VLLM_CONFIG_ROOT", "AMBIDEX_CACHE names our folder"),
    *no_effect("VLLM_USE_FASTOKENS VLLM_FASTSAFETENSORS_QUEUE_SIZE", MMAP),
    *no_effect(
        "TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE",
        "transformers is not used; HF_HOME and HF_HUB_OFFLINE are",
    ),
    # The server.
    *no_effect(
        "VLLM_ASSETS_CACHE* VLLM_MEDIA_* VLLM_MAX_MEDIA_* VLLM_MAX_AUDIO_* VLLM_IMAGE_* "
        "VLLM_VIDEO_* VLLM_AUDIO_* VLLM_MAX_IMAGE_PIXELS VLLM_MAX_EMBED_DECODE_BYTES "
        "VLLM_MM_INPUT_CACHE_*",
        IMAGES,
    ),
    *no_effect(
        "VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MAX_COMPLETION_PROMPTS "
        "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_CHAT_TEMPLATE_* "
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        _FIXED,
    ),
    *no_effect(
        "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
        "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_GPT_OSS_* GPT_OSS_SYSTEM_TOOL_MCP_LABELS",
        "tool calls and reasoning are not parsed",
    ),
    *no_effect(
        "VLLM_SERVER_DEV_MODE VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API "
        "VLLM_USE_RUST_FRONTEND VLLM_RUST_FRONTEND_PATH VLLM_SKIP_MODEL_NAME_VALIDATION",
        "the server has one set of routes",
    ),
    # Logs, traces, usage.
    *no_effect(
        "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_PREFIX "
        "VLLM_LOGGING_STREAM VLLM_LOGGING_COLOR VLLM_LOG_* VLLM_DISABLE_LOG_LOGO "
        "VLLM_NO_DEPRECATION_WARNING VLLM_REQUEST_BODY_LOG_LEVEL "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_GC_DEBUG VLLM_DEBUG_DUMP_PATH "
        "VLLM_DEBUG_MFU_METRICS",
        "logs are set by --log-level and --log-format",
    ),
    *no_effect(
        "VLLM_TRACE_FUNCTION VLLM_TORCH_PROFILER_* VLLM_TORCH_CUDA_PROFILE VLLM_PROFILER_* "
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING OTEL_* "
        "PROMETHEUS_MULTIPROC_DIR",
        TRACING,
    ),
    *no_effect(
        "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER "
        "DO_NOT_TRACK",
        "no usage is ever reported",
        quiet=True,
    ),
)
