// The flags. Each help text says what the flag does and how to choose its value.
#include "server/config/flags.h"

#include "server/config/flag_table.h"

namespace awqd {
namespace {

// gRPC counts message bytes in an int, and Protocol Buffers stops at 2 GiB.
constexpr int64_t kMaxMessageBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMinMessageBytes = 64 << 10;
constexpr int64_t kAnyBytes = int64_t{1} << 50;

// What becomes of models after the start.
void AddUpkeepFlags(FlagTable& table, Options& options) {
  table.Flag("watch_repository", options.watch.on,
             "Load models whose folders appear, load those anew whose files change, unload those "
             "whose folders go, while the server runs. Without --load_model all of them, with it "
             "those and what clients have loaded. A model that cannot be loaded is reported, and "
             "tried again when its files change; it does not end the server. A model that a client "
             "unloads stays unloaded until a client loads it.");
  table.Duration("watch_interval_s", options.watch.interval, absl::Seconds(1), {0.05, 86400.0},
                 "How long between two looks at the folders. A look opens every file of every "
                 "model: more on a file system that is slow, or shared by many.");
  table.Duration("watch_settle_s", options.watch.settle, absl::Seconds(1), {0.0, 86400.0},
                 "How long nothing in a model's folder may have changed before it is loaded, so "
                 "that no half of a model is. Longer than a writer pauses between two files, and, "
                 "over NFS, than clients keep what they know of files (acregmax, 60 s by default). "
                 "0 where folders are only ever moved into place as a whole.");
  table.Limit("idle_unload_s", options.idle_unload,
              "Unload a model that has computed nothing for this long; the next request that names "
              "it loads it again and waits for that, as long as its deadline allows. 0: never.");
  table
      .Add("pin", options.pinned,
           "Model that --idle_unload_s does not concern; repeat it for several.")
      ->delimiter(',')
      ->expected(1)
      ->take_all();
}

void AddModelFlags(FlagTable& table, Options& options) {
  table.Group("Models");
  table.Add(
      "model_repository", options.model_repository,
      "Directory whose subdirectories are models, each as downloaded from the Hub; or a cache of "
      "the Hub itself, such as ~/.cache/huggingface/hub, whose folder models--ORG--NAME is the "
      "model ORG--NAME. Clients can name models beneath it, and those of --model, and nothing "
      "else.");
  table.Folders("model", options.models,
                "A single folder to serve as the model NAME, beside the repository or without one; "
                "repeat it for several. Links out of the folder are refused. Loaded at start, "
                "whatever --load_model says.");
  table
      .Add("load_model", options.load_models,
           "Model of the repository to load at start; repeat it for several. Default: all of "
           "them. The server ends when one of them cannot be loaded, once it has tried all; see "
           "--keep_going. Name the models that you want where the repository is a cache with "
           "others that are not quantised.")
      ->delimiter(',')
      ->expected(1)
      ->take_all();
  table.Flag("keep_going", options.keep_going,
             "Start even when models cannot be loaded, or none can: serve the others, and log why "
             "these cannot be loaded.");
  AddUpkeepFlags(table, options);
  table.Group("Device");
  table.Add(
      "device", options.device,
      "auto: cuda:0 when it can be used, else the CPU. Or cpu, or cuda:N, or several such as "
      "cuda:0,cuda:1, which end the server when one is not there. cuda:0,cuda:0 is one GPU as "
      "two devices, each with its own memory limit and lanes; the id of the second is "
      "cuda:0#2. cpu:0,cpu:1 are devices that share the cores, to try several without GPUs.");
  table.Choice<model::Sharding>(
      "shard", options.sharding,
      {{"replicas", model::Sharding::kReplicas},
       {"columns", model::Sharding::kColumns},
       {"models", model::Sharding::kModels},
       {"experts", model::Sharding::kExperts}},
      "How several devices serve models. replicas: each holds every model, and a request runs on "
      "the one with the fewest tokens waiting or running; for models that fit, and for throughput. "
      "columns: each holds its share of the columns of every weight, and a request runs on all of "
      "them; for models that are larger than one device. models: each model lives whole on the "
      "device with most free memory when it is loaded; for many small models. experts: each expert "
      "of a mixture lives whole on one device, and a token's rows go to the devices that have its "
      "experts; other weights as with replicas. Has no effect with one device.");
  table.Number(
      "cpu_threads", options.cpu_threads, 0, 4096,
      "Threads of CPU kernels. 0: as many as the process may use; fewer leave cores to gRPC "
      "when clients are many and small.");
  table.Flag(
      "cpu_pin_threads", options.cpu_pin_threads,
      "Each thread of CPU kernels stays on a core of its own. For a machine that awqd has to "
      "itself; beside other programs a pinned thread waits where another core is free.");
  table.Flag("cpu_interleave", options.cpu_interleave,
             "Weights on the CPU go round the memory nodes, page by page, so that a product reads "
             "all of them at once. For machines of several sockets whose cores serve one model.");
  table.Bytes("device_memory_limit", options.device_memory_limit, 0, kAnyBytes,
              "Bytes that weights and buffers may take on each device. 0: all of it; set it when "
              "the device is shared. On the CPU it also bounds what a load holds beside them, but "
              "for 256 MiB.");
  table.Flag("batch_invariant", options.batch_invariant,
             "A token's result has the same bits whatever tokens share its batch and however many "
             "they are. Leaves out kernels whose order of summation depends on the count, and the "
             "dense path: free on the CPU up to the token threshold and on a GPU up to 16 tokens, "
             "beyond that 1.0 to 1.2 times as slow on an H100.");
  table.Flag(
      "int8_activations", options.rpc.int8_activations,
      "QuantizedMatmul takes floating activations as INT8_PER_TOKEN where the weight has a "
      "kernel for it and the request does not say otherwise. On a CPU half to three quarters "
      "of the time, with an error of about 1 % instead of 0.02 %.");
}

void AddListenFlags(FlagTable& table, Options& options) {
  services::Options& rpc = options.rpc;
  table.Group("Listening");
  table
      .Add("address", rpc.transport.addresses,
           "host:port to listen on; 0.0.0.0:8001 for every interface, which wants --tls_cert and "
           "--tokens. Port 0 picks a free one, which is logged. unix:/path listens on a socket "
           "file instead, for clients of this machine; repeat the flag for several addresses.")
      ->delimiter(',')
      ->expected(1)
      ->take_all();
  table
      .Add("unix_socket_mode", rpc.transport.unix_socket_mode,
           "Permissions of socket files, in octal: whoever may write to one may connect. 0600 for "
           "the server's own user, 0660 for its group, 0666 for everybody who reaches the "
           "directory.")
      ->default_str("0660")
      ->transform(CLI::Validator(ParseMode, "OCTAL", "mode"));
  table.Add(
      "metrics_address", options.metrics_address,
      "Numeric address and port for operators over HTTP, such as 127.0.0.1:8002: /metrics for "
      "Prometheus, /livez and /readyz for probes, and a page at /. Port 0 picks a free one, "
      "which is logged. Whoever reaches it reads names of models and counts, and no tensor; with "
      "--tokens all but the probes ask for a token with the role metrics, which beyond this "
      "machine "
      "takes TLS for gRPC or --insecure_tokens: this is plain HTTP. "
      "Default: off.");
  table.Add("port_file", options.port_file,
            "File that the bound port is written to once the server listens, for scripts that use "
            "port 0; 0 when it listens on sockets only.");
  table.Flag("reflection", rpc.reflection,
             "Answer gRPC reflection, so that grpcurl needs no proto files. Switch it off with "
             "--no_reflection where the API should not describe itself.");
  table.Flag(
      "channelz", rpc.channelz,
      "Has no effect any more: the server has no grpc.channelz.v1. Accepted, with a warning.");
  table.Flag(
      "orca", rpc.orca,
      "Tell clients how busy the server is, in ORCA's reports: at the end of every call for a "
      "result, and on xds.service.orca.v3 to callers with the role read. For gRPC's balancing "
      "policy weighted_round_robin, or a proxy that weighs servers; the reports name no model.");
}

void AddBoundFlags(FlagTable& table, Options& options) {
  services::Options& rpc = options.rpc;
  transport::Options& transport = rpc.transport;
  table.Group("Bounds");
  table.Bytes("max_receive_message_bytes", transport.max_receive_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest request. 64 MiB hold 8192 tokens of 4096 FP16 activations. Memory taken is "
              "up to this for each request in flight.");
  table.Bytes("max_send_message_bytes", transport.max_send_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest response; a larger one is refused before it is computed. Clients must allow "
              "as much: gRPC's own default for them is 4 MiB.");
  table.Bytes(
      "max_inline_weight_bytes", rpc.max_inline_weight_bytes, 0, kMaxMessageBytes,
      "Tensor bytes of a weight carried in a request. Prepared for the device it may take twice as "
      "many. 0 refuses inline weights.");
  table.Bytes("memory_quota_bytes", transport.memory_quota_bytes, 0, kAnyBytes,
              "Bytes gRPC may hold for messages that are being received. 0: 16 x "
              "max_receive_message_bytes. At least twice the largest message times the uploads "
              "that run at once; when it is used up, gRPC closes connections and ends calls with "
              "UNAVAILABLE or RESOURCE_EXHAUSTED.");
  table.Bytes(
      "max_in_flight_bytes", rpc.in_flight_bytes, 0, kAnyBytes,
      "Bytes of requests being parsed, queued or running and of answers not yet sent, over "
      "all calls; what would pass it is refused with RESOURCE_EXHAUSTED before it is "
      "parsed. 0: 8 x (max_receive_message_bytes + max_send_message_bytes). Set it to "
      "half of the memory left beside the weights, because gRPC still holds a message while "
      "it is copied. At least both message limits together.");
  table.Number(
      "rpc_threads", rpc.rpc_threads, 0, 256,
      "Threads that receive requests and send answers, and on the CPU run short products "
      "themselves. 0: one for every four cores on the CPU, so that requests that come together "
      "run together; half of the cores, 2 to 16, beside a GPU. More when these threads are "
      "busy and cores are not: many clients, or large messages.");
  table.Number(
      "max_concurrent_streams", transport.max_concurrent_streams, 1, 1 << 20,
      "Calls at once per connection; more wait in the client. Bounds what one client takes. Of a "
      "client that does not wait, calls are refused with RESOURCE_EXHAUSTED from twice as many on, "
      "and at least 64 more.");
  table.Number("max_connections", transport.max_connections, 1, 1 << 20,
               "Connections at once, of all clients; one more is closed at once. Never more than "
               "three quarters of the files that the process may open (ulimit -n).");
  table.Number(
      "max_connections_per_peer", transport.max_connections_per_peer, 1, 1 << 20,
      "The same of one IPv4 address, one IPv6 /64 network, or one user of a Unix domain "
      "socket. Behind a proxy all clients are one peer: as many as max_connections then. A "
      "peer may have four times as many calls in flight, beyond eight on each connection.");
  table.Number(
      "stream_in_flight", rpc.stream_in_flight, 1, 1 << 16,
      "Requests of one QuantizedMatmulStream in flight; reading pauses beyond. Enough to keep "
      "batches full: tokens per batch / tokens per request.");
  table.Bytes("stream_chunk_bytes", rpc.chunk_bytes, 4096, kMaxMessageBytes,
              "About how many bytes a chunk of DequantizeStream holds. Small ones bound memory per "
              "slow reader, large ones save calls.");
}

void AddSharedMemoryFlags(FlagTable& table, Options& options) {
  services::SharedMemoryOptions& shared = options.rpc.shared_memory;
  table.Group("Shared memory");
  table.Add("shared_memory_prefix", shared.prefix,
            "Takes tensors from, and writes answers to, POSIX shared-memory objects of clients on "
            "this machine, when their names begin with this, for example awqd-. Empty: off. Every "
            "caller can name every such object that this process may open, so switch it on only "
            "where callers may know each other's tensors, or choose names that cannot be guessed.");
  table.Number("max_shared_memory_ranges", shared.max_open, 1, 1 << 20,
               "Ranges of such objects in use at once, two for a request at most; each is an open "
               "file. Their bytes count for max_in_flight_bytes.");
}

void AddBatchFlags(FlagTable& table, Options& options) {
  engine::EngineOptions& engine = options.engine;
  batching::BatchOptions& batching = engine.batching;
  table.Group("Batching");
  table
      .Add("token_threshold", engine.token_threshold,
           "Merged tokens from which a weight is dequantised for a dense product instead of being "
           "decoded inside the product. 0: always. default: 256, but never where the kernel that "
           "decodes inside is as fast or faster at any count (4-bit weights on compute capability "
           "9.0). auto: what measures best for each shape on this device, a few products per shape "
           "at load.")
      ->default_str("default")
      ->transform(CLI::Validator(ParseThreshold, "TOKENS|default|auto", "threshold"));
  table.Number("max_batch_tokens", batching.max_batch_tokens, int64_t{1}, int64_t{1} << 40,
               "Tokens that are merged into one batch. More than a few hundred add latency without "
               "saving weight traffic.");
  table.Duration(
      "max_queue_delay_us", batching.max_queue_delay, absl::Microseconds(1), {0.0, 60e6},
      "How long the oldest request waits for others to merge with while the device is idle. 0: an "
      "idle "
      "device starts at once and batches form under load.");
  table.Duration(
      "max_starvation_ms", batching.max_starvation, absl::Milliseconds(1), {0.0, 3.6e6},
      "A request that has waited this long goes before every priority, so urgent requests "
      "cannot delay it longer.");
  table.Number(
      "max_queued_requests", batching.max_queued_tasks, int64_t{1}, int64_t{1} << 32,
      "How many requests may wait; one more is refused with RESOURCE_EXHAUSTED. Choose so that a "
      "full queue drains within the clients' deadlines.");
  table.Number("max_queued_tokens", batching.max_queued_tokens, int64_t{1}, int64_t{1} << 40,
               "As max_queued_requests, in tokens.");
  table.Bytes("max_queued_bytes", batching.max_queued_bytes, 1, kAnyBytes,
              "As max_queued_requests, in bytes of activations: the bound on memory.");
  table.Bytes("staging_bytes", engine.staging_bytes, 0, kAnyBytes,
              "Host memory for payloads and results that each device keeps for reuse, pinned on a "
              "GPU. About what requests and answers hold in flight under normal load; less gives "
              "memory back and allocates for each large request.");
  table.Number("lanes", engine.lanes, 0, 64,
               "Worker threads with a device stream each. 0: one on the CPU, two on a GPU.");
  table.Number(
      "answer_threads", engine.answer_threads, -1, 64,
      "Threads that help lanes to answer large batches, so that a lane is soon free for the "
      "next. -1: a quarter of the cores, at most four, on a GPU; none on the CPU.");
}

void AddCallRecordFlags(FlagTable& table, Options& options) {
  table.Choice<obs::AccessLogMode>(
      "access_log", options.access_log.mode,
      {{"off", obs::AccessLogMode::kOff},
       {"slow", obs::AccessLogMode::kSlow},
       {"sampled", obs::AccessLogMode::kSampled},
       {"all", obs::AccessLogMode::kAll}},
      "Which calls have a line in the log. off: none; slow: slow ones; sampled: up to "
      "--access_log_per_s a second of the slow, of the failed and of the others each, but no probe "
      "of health that is answered; all: every call. A line tells how many of its kind were skipped "
      "before it.");
  table.Number(
      "access_log_per_s", options.access_log.lines_per_s, 1, 1'000'000,
      "Lines a second of each of these kinds; of --access_log=all there is no bound. The default "
      "keeps the log of a day under 250 MB.");
  table.Limit(
      "slow_call_s", options.access_log.slow,
      "A call whose one product or Dequantize takes this long is slow: its line is a warning, "
      "and names the step that took longest. Calls of several requests, and those that load "
      "models or watch health, last as long as they are meant to. 0: none is slow.");
  table.Add("trace_file", options.trace.file,
            "File to which traces are appended, an OpenTelemetry span a line, as JSON. Default: no "
            "traces.");
  table.Add(
      "otlp_endpoint", options.trace.otlp_endpoint,
      "host:port of a collector of OpenTelemetry that takes traces over gRPC (4317 by habit), "
      "in plaintext. Default: no traces.");
  table.Number("trace_sample", options.trace.sample, 0, 1,
               "Share of calls that are traced, of those that carry no header traceparent. Calls "
               "that carry one are traced when it says so.");
}

void AddLifecycleFlags(FlagTable& table, Options& options) {
  transport::Options& transport = options.rpc.transport;
  table.Group("Lifecycle");
  table.Duration("drain_delay_ms", options.drain_delay, absl::Milliseconds(1), {0, 600000},
                 "After SIGTERM: how long to go on serving with health NOT_SERVING, so that load "
                 "balancers stop sending first. In Kubernetes a few seconds.");
  table.Duration(
      "drain_timeout_s", options.drain_timeout, absl::Seconds(1), {0.0, 86400.0},
      "After that: how long calls in flight may take before they are cancelled. With the "
      "delay, less than the time the supervisor waits before SIGKILL.");
  table.Duration("keepalive_time_s", transport.keepalive_time, absl::Seconds(1), {1.0, 86400.0},
                 "Silence after which a connection is pinged, to find clients that vanished.");
  table.Duration("keepalive_timeout_s", transport.keepalive_timeout, absl::Seconds(1),
                 {1.0, 86400.0},
                 "How long that ping may stay unanswered before the connection is closed.");
  table.Duration("handshake_timeout_s", transport.handshake_timeout, absl::Seconds(1),
                 {0.01, 3600.0},
                 "How long a new connection may take to send its HTTP/2 settings before it is "
                 "closed. A few round trips of the slowest client.");
  table.Duration(
      "send_timeout_s", transport.send_timeout, absl::Seconds(1), {0.01, 86400.0},
      "How long an answer, or one message of a stream, may wait for its client to take it before "
      "the call is cancelled and its bytes are given back. Longer than the largest answer takes on "
      "the slowest wanted line: 64 MiB in 60 s are 9 Mbit/s.");
  table.Duration(
      "min_ping_interval_s", transport.min_ping_interval, absl::Seconds(1), {0.0, 86400.0},
      "Clients that ping an idle connection more often than this are sent away. At most their "
      "keepalive time.");
  table.Limit(
      "max_connection_idle_s", transport.max_connection_idle,
      "Close connections without calls after this long, at once: a call sent in that moment "
      "fails with UNAVAILABLE. 0: never.");
  table.Limit("max_connection_age_s", transport.max_connection_age,
              "Close connections after this long, so that clients look for new servers. 0: never.");
  table.Limit(
      "max_connection_age_grace_s", transport.max_connection_age_grace,
      "How long calls may continue on a connection that is too old, before they are cut off. 0: "
      "as long as they take. Longer than the longest call and stream that is still wanted.");
  table.Group("Logging");
  table.Choice<obs::LogLevel>("log_level", options.log_level,
                              {{"debug", obs::LogLevel::kDebug},
                               {"info", obs::LogLevel::kInfo},
                               {"warning", obs::LogLevel::kWarning},
                               {"error", obs::LogLevel::kError}},
                              "debug, info, warning or error. debug has a line per request.");
  table.Choice<obs::LogFormat>("log_format", options.log_format,
                               {{"text", obs::LogFormat::kText}, {"json", obs::LogFormat::kJson}},
                               "text for people, json (one object a line) for machines.");
  AddCallRecordFlags(table, options);
}

}  // namespace

void AddFlags(CLI::App* app, Options* options) {
  FlagTable table(app);
  AddModelFlags(table, *options);
  AddListenFlags(table, *options);
  AddSecurityFlags(table, *options);
  AddBoundFlags(table, *options);
  AddSharedMemoryFlags(table, *options);
  AddBatchFlags(table, *options);
  AddLifecycleFlags(table, *options);
}

}  // namespace awqd
