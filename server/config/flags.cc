// The flags. Each help text says what the flag does and how to choose its value.
#include "server/config/flag_table.h"

namespace awqd {
namespace {

using security::ModelControl;

// gRPC counts message bytes in an int, and Protocol Buffers stops at 2 GiB.
constexpr int64_t kMaxMessageBytes = (int64_t{1} << 31) - 65536;
constexpr int64_t kMinMessageBytes = 64 << 10;
constexpr int64_t kAnyBytes = int64_t{1} << 50;

// Flags that change the served models after the start.
void AddReconcileFlags(FlagTable& table, Options& options) {
  table.Flag(
      "watch_repository", options.watch.on,
      "Watch the repository while the server runs: load new model folders, reload models whose "
      "files change, and unload models whose folders disappear. With --load_model this covers "
      "those models and the ones that clients have loaded; without it, all models. A model that "
      "fails to load is logged and tried again when its files change; the server goes on. A model "
      "that a client unloads stays unloaded until a client loads it.");
  table.Duration("watch_interval_s", options.watch.interval, absl::Seconds(1), {0.05, 86400.0},
                 "Seconds between two polls of the watched folders. A poll opens every file of "
                 "every model, so choose more on a slow or shared file system.");
  table.Duration(
      "watch_settle_s", options.watch.settle, absl::Seconds(1), {0.0, 86400.0},
      "Seconds without a change in a model's folder before the model is loaded, so that no partly "
      "written model is loaded. Choose more than the writer pauses between two files. On NFS, also "
      "choose more than clients cache file attributes (acregmax, 60 s by default). 0 if folders "
      "are always moved into place as a whole.");
  table.Limit("idle_unload_s", options.idle_unload,
              "Unload a model after this many seconds without a request; the next request that "
              "names it loads it again. That request waits for the load as long as its deadline "
              "allows. 0: never unload.");
  table.List("pin", options.pinned,
             "Model that --idle_unload_s never unloads; repeat the flag for several.");
}

void AddModelFlags(FlagTable& table, Options& options) {
  table.Group("Models");
  table.Value("model_repository", options.model_repository,
              "Directory whose subdirectories are models, as downloaded from the Hugging Face Hub. "
              "It may also be a cache of the Hub, such as ~/.cache/huggingface/hub, where the "
              "folder models--ORG--NAME is the model ORG--NAME. Clients can name the models in it "
              "and those of --model, and nothing else.");
  table.Folders("model", options.models,
                "A single folder, GGUF file (the first of its parts) or .safetensors file of "
                "ComfyUI, to serve "
                "as the model NAME, with or without a repository; repeat the flag for several. "
                "Links that leave the folder are refused. "
                "It is loaded at start, whatever --load_model says.");
  table.List("load_model", options.load_models,
             "Model of the repository to load at start; repeat the flag for several. The Hub's "
             "ORG/NAME is the model ORG--NAME. Default: all models. The server tries all of them "
             "and exits if one fails to load; see --keep_going. Name the models if the repository "
             "is a cache that also has models that are not quantised.");
  table.Flag("keep_going", options.keep_going,
             "Start with the models that load, even if none does or there is none, and log why the "
             "others do not. Use it for repositories that other people fill.");
  table.Flag("require_all_weights", options.require_all_weights,
             "Fail to load a model where one of its quantised weights cannot be read. By default "
             "the server serves the others, says in ListModels, GetModel and the log which it does "
             "not, and answers requests for these with the reason.");
  AddReconcileFlags(table, options);
}

void AddDeviceFlags(FlagTable& table, Options& options) {
  table.Group("Device");
  table.Value("device", options.device,
              "Device or devices to use: auto, cpu, cuda:N, or a list such as cuda:0,cuda:1. auto "
              "is cuda:0 if it is usable, else the CPU. The server exits if a listed device is "
              "missing. cuda:0,cuda:0 uses one GPU as two devices, each with its own memory limit "
              "and lanes; the second has the id cuda:0#2. cpu:0,cpu:1 are devices that share the "
              "cores, for trying several devices without GPUs.");
  table.Choice<model::Sharding>(
      "shard", options.sharding,
      {{"replicas", model::Sharding::kReplicas},
       {"columns", model::Sharding::kColumns},
       {"models", model::Sharding::kModels},
       {"experts", model::Sharding::kExperts}},
      "How several devices serve models: replicas, columns, models or experts. replicas: each "
      "device holds every model, and a request runs on the device with the fewest tokens waiting "
      "or running; for models that fit on one device, and for throughput. columns (tensor "
      "parallel): each device holds some columns of every weight, and a request runs on all "
      "devices; for models that are larger than one device. models: each model is on one device, "
      "the one with most free memory when the model is loaded; for many small models. experts "
      "(expert parallel): each expert of a mixture is on one device, and a token's rows go to the "
      "devices of its experts; other weights are as with replicas. It has no effect with one "
      "device.");
  table.Number("cpu_threads", options.cpu_threads, 0, 4096,
               "Threads of CPU kernels. 0: as many as the process may use. Fewer leave cores to "
               "gRPC if there are many clients with small requests.");
  table.Flag("cpu_pin_threads", options.cpu_pin_threads,
             "Pin each thread of CPU kernels to a core. Use it if awqd has the machine to itself; "
             "beside other programs a pinned thread waits although another core is free.");
  table.Flag(
      "cpu_interleave", options.cpu_interleave,
      "Interleave weights on the CPU over the NUMA nodes, page by page, so that a product reads "
      "from all nodes at once. Use it on machines of several sockets whose cores serve one model.");
  table.Bytes("device_memory_limit", options.device_memory_limit, 0, kAnyBytes,
              "Bytes that weights and buffers may use on each device. 0: all of its memory; set it "
              "if the device is shared. On the CPU it also bounds the memory that a load needs "
              "besides weights, except 256 MiB.");
  table.Flag("batch_invariant", options.batch_invariant,
             "Give a token's result the same bits, whichever and however many tokens share its "
             "batch. It leaves out the dense path, and kernels whose order of summation depends on "
             "the number of tokens. It costs nothing on the CPU up to the token threshold and on a "
             "GPU up to 16 tokens; beyond that an H100 needs 1.0 to 1.2 times as long.");
  table.Flag(
      "int8_activations", options.rpc.int8_activations,
      "Round floating-point activations of QuantizedMatmul to INT8_PER_TOKEN where the weight has "
      "a kernel for it and the request does not say otherwise. On a CPU this takes half to three "
      "quarters of the time, with an error of about 1 % instead of 0.02 %.");
  table.Flag("fp8_activations", options.rpc.fp8_activations,
             "Round floating-point activations of products to E4M3 where the weight's "
             "checkpoint declares it and the request does not say otherwise (FP8_AS_DECLARED). "
             "Hopper GPUs multiply them at twice the rate of 16 bits, other devices after the "
             "rounding as they multiply others; the error is about 4 %.");
}

void AddListenFlags(FlagTable& table, Options& options) {
  services::Options& rpc = options.rpc;
  table.Group("Listening");
  table.List("address", rpc.transport.addresses,
             "Address host:port to listen on; repeat the flag for several. 0.0.0.0:8001 listens on "
             "every interface and should have --tls_cert and --tokens. Port 0 picks a free port, "
             "which is logged. unix:/path listens on a socket file, for clients on this machine.");
  table
      .Value("unix_socket_mode", rpc.transport.unix_socket_mode,
             "Permissions of socket files, in octal. Users who may write to a socket file may "
             "connect: 0600 for the server's own user, 0660 for its group, 0666 for everybody who "
             "can reach the directory.")
      ->default_str("0660")
      ->transform(CLI::Validator(ParseMode, "OCTAL", "mode"));
  table.List(
      "metrics_address", options.metrics_addresses,
      "Address host:port of the HTTP server for operators, such as 127.0.0.1:8002, or unix:/path; "
      "repeat the flag for several. 0.0.0.0 is every interface, by IPv4 and IPv6. It serves "
      "/metrics for Prometheus, /livez and /readyz for probes, and a page at /. Port 0 "
      "picks a free port, which is logged. Clients can read names of models and counts there, but "
      "no tensors. With --tokens, all paths but the probes need a token with the role metrics. On "
      "an address that other machines can reach, --tokens also needs TLS for gRPC or "
      "--insecure_tokens, because this server speaks plain HTTP. Default: off.");
  table.Value("port_file", options.port_file,
              "File to which the bound port is written once the server listens, for scripts that "
              "use port 0. The file has 0 if the server listens on sockets only.");
  table.Flag("reflection", rpc.reflection,
             "Answer gRPC reflection, so that grpcurl needs no proto files. Switch it off with "
             "--no_reflection if the API should not describe itself.");
  table.Flag(
      "channelz", rpc.channelz,
      "Has no effect any more: the server has no grpc.channelz.v1. Accepted, with a warning.");
  table.Flag("orca", rpc.orca,
             "Report the server's load to clients with ORCA, at the end of every inference call "
             "and through xds.service.orca.v3 to callers with the role read. Use it for gRPC's "
             "balancing policy weighted_round_robin, or for a proxy that weighs servers. The "
             "reports name no model.");
}

void AddSecurityFlags(FlagTable& table, security::Options& security) {
  table.Group("Security");
  table.Value(
      "tls_cert", security.tls_cert,
      "PEM file with the server's certificate, followed by the intermediate certificates up to its "
      "CA. host:port addresses then accept TLS 1.2 or newer only; unix: addresses stay plain. This "
      "file and those of --tls_key and --tls_client_ca are read again within three seconds of a "
      "change, for new connections. A new file that is not valid is logged and not used.");
  table.Value("tls_key", security.tls_key,
              "PEM file with the private key of --tls_cert, without a passphrase.");
  table.Value("tls_client_ca", security.tls_client_ca,
              "PEM file of CAs; clients must then show a certificate that one of them signed "
              "(mTLS). --tokens can give these clients names and roles.");
  table.Value(
      "tokens", security.tokens,
      "File of the identities that may call. A line has a name, roles separated by commas "
      "(infer, read, admin, metrics, attach), and one of: sha256:DIGEST of a token, as awqctl "
      "token prints it; or cert:cn:NAME, cert:dns:NAME and so on of a client certificate. "
      "Calls without a known token or certificate, or without the method's role, are "
      "refused. The file is read again within two seconds of a change.");
  table.Flag("insecure_tokens", security.insecure_tokens,
             "Accept tokens without TLS on addresses that other machines can reach, for gRPC and "
             "for metrics. Anybody on the network path can then read them. Use it behind a proxy "
             "that does TLS.");
  table.Flag("open_health", security.open_health,
             "Answer grpc.health.v1 without a token, for probes. With --no_open_health, callers "
             "need an identity of any role.");
  table.Choice<ModelControl>("model_control", security.model_control,
                             {{"auto", ModelControl::kAuto},
                              {"any", ModelControl::kAny},
                              {"admin", ModelControl::kAdmin},
                              {"none", ModelControl::kNone}},
                             "Who may load and unload models: any caller, callers with the role "
                             "admin, or none. auto: admin with --tokens; without --tokens, any if "
                             "all addresses are loopback or unix:, else none.");
}

void AddClientFlags(FlagTable& table, transport::ClientQuota& client) {
  table.Number(
      "max_requests_in_flight_per_client", client.requests_in_flight, int64_t{0}, int64_t{1} << 32,
      "Largest number of requests that one client may have in flight; 0: no limit. Messages of "
      "streams and open streams count too. Further requests are refused with RESOURCE_EXHAUSTED "
      "and a retry delay. A client is an identity of --tokens; without --tokens it is a machine.");
  table.Bytes("max_bytes_in_flight_per_client", client.bytes_in_flight, 0, int64_t{1} << 50,
              "Like --max_in_flight_bytes, but for one client; 0: no limit. Choose at least the "
              "sum of both message limits.");
  table.Number("max_requests_per_second_per_client", client.requests_per_second, 0.0, 1e9,
               "Largest rate at which one client may begin requests, on average; 0: no limit. A "
               "token bucket allows bursts of one second's requests.");
}

void AddLimitFlags(FlagTable& table, Options& options) {
  services::Options& rpc = options.rpc;
  transport::Options& transport = rpc.transport;
  table.Group("Bounds");
  table.Bytes("max_receive_message_bytes", transport.max_receive_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest request. 64 MiB hold 8192 tokens of 4096 FP16 activations. Each request in "
              "flight may use this much memory.");
  table.Bytes("max_send_message_bytes", transport.max_send_message_bytes, kMinMessageBytes,
              kMaxMessageBytes,
              "Largest response; a request for a larger one is refused before it is computed. "
              "Clients must allow as much: gRPC's own default for clients is 4 MiB.");
  table.Bytes("max_inline_weight_bytes", rpc.max_inline_weight_bytes, 0, kMaxMessageBytes,
              "Largest inline weight of a request, in bytes of its tensors; 0 refuses inline "
              "weights. Once prepared for the device, a weight may use twice as many bytes.");
  table.Bytes("memory_quota_bytes", transport.memory_quota_bytes, 0, kAnyBytes,
              "Memory that gRPC may use for messages that are being received. 0: 16 x "
              "max_receive_message_bytes. Choose at least twice the largest message times the "
              "number of concurrent uploads. When the quota is used up, gRPC closes connections "
              "and ends calls with UNAVAILABLE or RESOURCE_EXHAUSTED.");
  table.Bytes(
      "max_in_flight_bytes", rpc.in_flight_bytes, 0, kAnyBytes,
      "Largest sum of the bytes of requests that are parsed, queued or running and of answers that "
      "are not sent yet, over all calls. A request beyond it is refused with RESOURCE_EXHAUSTED "
      "before it is parsed. 0: 8 x (max_receive_message_bytes + max_send_message_bytes). Choose "
      "half of the memory that weights leave free, because gRPC still holds a message while it is "
      "copied, and at least the sum of both message limits.");
  table.Number(
      "rpc_threads", rpc.rpc_threads, 0, 256,
      "Threads that receive requests and send answers, and that run short products themselves on "
      "the CPU. 0: one for every four cores on the CPU, so that concurrent requests run in "
      "parallel; half of the cores, 2 to 16, with a GPU. Choose more if these threads are busy "
      "while cores are idle: with many clients, or large messages.");
  table.Number("max_metadata_bytes", transport.max_metadata_bytes, 1024, 1 << 20,
               "Largest headers (metadata) of a call; a call with larger ones is refused with "
               "RESOURCE_EXHAUSTED and logged. Choose more where a mesh or a gateway adds headers; "
               "each call that waits may hold as much.");
  table.Number("max_concurrent_streams", transport.max_concurrent_streams, 1, 1 << 20,
               "Largest number of concurrent calls of one connection; further calls wait in the "
               "client. This bounds what one client uses. A client that ignores the limit gets "
               "RESOURCE_EXHAUSTED for calls beyond twice the limit, and at least 64 beyond it.");
  table.Number(
      "max_connections", transport.max_connections, 1, 1 << 20,
      "Largest number of connections of all clients; further ones are closed at once. The server "
      "never allows more than three quarters of the files that the process may open (ulimit -n).");
  table.Number(
      "max_connections_per_peer", transport.max_connections_per_peer, 1, 1 << 20,
      "Largest number of connections of one peer: an IPv4 address, an IPv6 /64 network, or a user "
      "of a Unix domain socket. Behind a proxy all clients are one peer; choose max_connections "
      "then. A peer may have four times as many calls in flight, beyond eight on each connection.");
  table.Number(
      "stream_in_flight", rpc.stream_in_flight, 1, 1 << 16,
      "Largest number of requests of one QuantizedMatmulStream in flight; beyond it the server "
      "stops reading. Choose enough to fill batches: tokens per batch / tokens per request.");
  table.Bytes("stream_chunk_bytes", rpc.chunk_bytes, 4096, kMaxMessageBytes,
              "Approximate size of a chunk of DequantizeStream. Small chunks need less memory for "
              "each slow reader; large chunks save messages.");
}

void AddSharedMemoryFlags(FlagTable& table, services::SharedMemoryOptions& shared) {
  table.Group("Shared memory");
  table.List(
      "shared_memory_prefix", shared.prefixes,
      "Allow clients on this machine to pass tensors, and to receive answers, in POSIX "
      "shared-memory objects whose names begin with this prefix, for example awqd-; repeat the "
      "flag for several. Objects that are named after tensors, as perf_analyzer makes them (y, "
      "x_0_0), are allowed then too. Default: off. "
      "Every caller can name every such object that this process may open. So use it only if "
      "callers may read each other's tensors, or choose names that cannot be guessed.");
  table.Number("max_shared_memory_ranges", shared.max_open, 1, 1 << 20,
               "Largest number of shared-memory ranges in use at once. A request uses two at most, "
               "and each range is an open file. Their bytes count for --max_in_flight_bytes.");
  table.Flag("cuda_shared_memory", shared.cuda,
             "Allow clients on this machine to share memory of GPUs (CUDA IPC): kernels read "
             "activations and write results there, and no byte passes through the host. At most "
             "256 regions of an identity, each as long as the call or the connection that "
             "registered it. No effect unless every --device is a GPU.");
}

void AddRingFlags(FlagTable& table, ring::Options& ring) {
  table.Group("Rings");
  table.Value("ring_path", ring.path,
              "Socket file at which clients on this machine get a ring: memory through which "
              "prepared calls are made without messages. Default: no rings. It has the permissions "
              "--unix_socket_mode and, with --tokens, needs the role infer. A product of one token "
              "takes some 10 us by a ring where a message takes hundreds.");
  table.Duration("ring_spin_us", ring.spin, absl::Microseconds(1), {0.0, 1e6},
                 "How long the thread of the rings polls after a call before it sleeps. To wake it "
                 "costs a call some 5 to 50 us; to poll costs a core while there is traffic. "
                 "Choose the usual pause between two calls of a client, or 0 where cores are few.");
  table.Number("max_rings", ring.max_rings, 1, 1 << 12,
               "Largest number of rings of all clients, and of connections that ask for one.");
  table.Number("max_rings_per_client", ring.max_rings_per_client, 1, 1 << 12,
               "Largest number of rings of one user of the machine, and of one identity.");
  table.Bytes("max_ring_bytes", ring.max_bytes, 4096, int64_t{1} << 40,
              "Largest payload of a ring, for tensors. The memory is taken as it is used, and "
              "counts for no other limit.");
}

void AddLendingFlags(FlagTable& table, std::string& path) {
  table.Group("Lending");
  table.Value(
      "lend", path,
      "Socket file at which processes of this machine lease the weights of models: they map "
      "the server's memory, for reading, and compute with libawqd. Default: off. It has the "
      "permissions --unix_socket_mode and, with --tokens, needs the role attach. Weights then "
      "lie in one allocation for each model and device, which lives until nobody has it "
      "mapped. On a GPU a borrower could map it for writing: lend to processes that you "
      "trust with the results.");
}

void AddBatchFlags(FlagTable& table, Options& options) {
  engine::EngineOptions& engine = options.engine;
  batching::BatchOptions& batching = engine.batching;
  table.Group("Batching");
  table
      .Value("token_threshold", engine.token_threshold,
             "Number of merged tokens from which a weight is dequantised for a dense product, "
             "instead of being decoded inside the product. 0: always. default: what was "
             "measured of the kernel that decodes inside the product (never, for 4-bit weights on "
             "compute capability 9.0), else 256. auto: the fastest choice for "
             "each shape on this device, measured at load with a few products per shape.")
      ->default_str("default")
      ->transform(CLI::Validator(ParseThreshold, "TOKENS|default|auto", "threshold"));
  table.Number("max_batch_tokens", batching.max_batch_tokens, int64_t{1}, int64_t{1} << 40,
               "Largest number of tokens in one batch. More than a few hundred add latency without "
               "saving weight traffic.");
  table.Duration(
      "max_queue_delay_us", batching.max_queue_delay, absl::Microseconds(1), {0.0, 60e6},
      "Longest time that the oldest request waits for others to join its batch while the device is "
      "idle. 0: an idle device starts at once, and batches form under load.");
  table.Duration("max_batch_ms", batching.max_batch_time, absl::Milliseconds(1), {0.0, 3.6e6},
                 "Longest expected time of one batch of several requests, learned from the batches "
                 "before. What arrives meanwhile waits as long.");
  table.Duration("max_starvation_ms", batching.max_starvation, absl::Milliseconds(1), {0.0, 3.6e6},
                 "Waiting time after which a request runs before all priorities, in every second "
                 "batch, so that urgent requests cannot delay it much longer.");
  table.Duration(
      "max_queue_ms", batching.max_queue_time, absl::Milliseconds(1), {0.0, 3.6e6},
      "Longest expected wait of a request for its turn; a request that would wait longer "
      "is refused on arrival with RESOURCE_EXHAUSTED. One that cannot meet its deadline "
      "is refused as well. One that takes more than 16 ms itself may wait longer in proportion.");
  table.Number(
      "max_queued_requests", batching.max_queued_tasks, int64_t{1}, int64_t{1} << 32,
      "Largest number of requests that may wait; further ones are refused with RESOURCE_EXHAUSTED. "
      "Choose it so that a full queue drains within the clients' deadlines.");
  table.Number("max_queued_tokens", batching.max_queued_tokens, int64_t{1}, int64_t{1} << 40,
               "Like --max_queued_requests, but in tokens.");
  table.Bytes("max_queued_bytes", batching.max_queued_bytes, 1, kAnyBytes,
              "Like --max_queued_requests, but in bytes of activations; it bounds memory.");
  table.Bytes("staging_bytes", engine.staging_bytes, 0, kAnyBytes,
              "Host memory for payloads and results that each device keeps for reuse; pinned for a "
              "GPU. Choose the bytes of requests and answers in flight under normal load. With "
              "less, memory is freed and allocated again for each large request.");
  table.Number("lanes", engine.lanes, 0, 64,
               "Worker threads of a device, each with a stream of its own. 0: one on the CPU, two "
               "on a GPU.");
  table.Number(
      "answer_threads", engine.answer_threads, -1, 64,
      "Threads that help lanes to answer large batches, so that a lane is soon free for the next "
      "batch. -1: a quarter of the cores, at most four, for a GPU; none for the CPU.");
}

void AddLifecycleFlags(FlagTable& table, Options& options) {
  transport::Options& transport = options.rpc.transport;
  table.Group("Lifecycle");
  table.Duration(
      "drain_delay_ms", options.drain_delay, absl::Milliseconds(1), {0, 600000},
      "Time after SIGTERM in which the server goes on serving with health NOT_SERVING, so that "
      "load balancers stop sending requests first. Use a few seconds in Kubernetes.");
  table.Duration(
      "drain_timeout_s", options.drain_timeout, absl::Seconds(1), {0.0, 86400.0},
      "Time after --drain_delay_ms in which calls in flight may end before they are cancelled. The "
      "sum of both should be less than the supervisor waits before SIGKILL.");
  table.Duration(
      "keepalive_time_s", transport.keepalive_time, absl::Seconds(1), {1.0, 86400.0},
      "Silence after which the server pings a connection, to find clients that vanished.");
  table.Duration("keepalive_timeout_s", transport.keepalive_timeout, absl::Seconds(1),
                 {1.0, 86400.0},
                 "Time that a client has to answer such a ping before its connection is closed.");
  table.Duration("handshake_timeout_s", transport.handshake_timeout, absl::Seconds(1),
                 {0.01, 3600.0},
                 "Time that a new connection has to send its HTTP/2 settings before it is closed. "
                 "Choose a few round trips of the slowest client.");
  table.Duration("send_timeout_s", transport.send_timeout, absl::Seconds(1), {0.01, 86400.0},
                 "Time that a client has to receive an answer, or one message of a stream, before "
                 "the call is cancelled and its bytes are released. Choose more than the largest "
                 "answer takes on the slowest connection: 64 MiB in 60 s need 9 Mbit/s.");
  table.Duration(
      "min_ping_interval_s", transport.min_ping_interval, absl::Seconds(1), {0.0, 86400.0},
      "Shortest allowed time between two pings of a client on an idle connection; clients that "
      "ping more often are disconnected. Choose at most the clients' keepalive time.");
  table.Limit("max_connection_idle_s", transport.max_connection_idle,
              "Close a connection after this long without calls; 0: never. A call that is sent at "
              "that moment fails with UNAVAILABLE.");
  table.Limit("max_connection_age_s", transport.max_connection_age,
              "Close a connection at this age, so that clients discover new servers; 0: never.");
  table.Limit("max_connection_age_grace_s", transport.max_connection_age_grace,
              "Time that calls may continue on a connection beyond --max_connection_age_s before "
              "they are cancelled; 0: no limit. Choose more than the longest call and stream.");
}

void AddLogFlags(FlagTable& table, Options& options) {
  table.Group("Logging");
  table.Choice<obs::LogLevel>(
      "log_level", options.log_level,
      {{"debug", obs::LogLevel::kDebug},
       {"info", obs::LogLevel::kInfo},
       {"warning", obs::LogLevel::kWarning},
       {"error", obs::LogLevel::kError}},
      "Lowest level that is logged: debug, info, warning or error. debug logs every request.");
  table.Choice<obs::LogFormat>(
      "log_format", options.log_format,
      {{"text", obs::LogFormat::kText}, {"json", obs::LogFormat::kJson}},
      "Format of the log: text for people, or json (one object a line) for machines.");
  table.Choice<obs::AccessLogMode>(
      "access_log", options.access_log.mode,
      {{"off", obs::AccessLogMode::kOff},
       {"slow", obs::AccessLogMode::kSlow},
       {"sampled", obs::AccessLogMode::kSampled},
       {"all", obs::AccessLogMode::kAll}},
      "Calls that have a line in the log: off, slow, sampled or all. slow: slow calls. sampled: up "
      "to --access_log_per_s lines a second for each of slow, failed and other calls, but none for "
      "a health probe that was answered. all: every call. A line says how many calls of its kind "
      "were skipped before it.");
  table.Number("access_log_per_s", options.access_log.lines_per_s, 1, 1'000'000,
               "Largest number of lines a second for each kind of call in the access log. "
               "--access_log=all has no limit. The default keeps the log of a day below 250 MB.");
  table.Limit("slow_call_s", options.access_log.slow,
              "Duration from which a call of one product or Dequantize is slow; 0: none is. The "
              "line of a slow call is a warning that names the step that took longest. Calls of "
              "several requests, loads of models and health watches are never slow.");
  table.Value("trace_file", options.trace.file,
              "File to which traces are appended, as one OpenTelemetry span in JSON a line. "
              "Default: no traces.");
  table.Value("otlp_endpoint", options.trace.otlp_endpoint,
              "Address of an OpenTelemetry collector that receives traces over gRPC: host:port or "
              "http://host:port in plaintext, https://host:port with TLS, or unix:/path; usually "
              "port 4317. The variables OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and "
              "OTEL_EXPORTER_OTLP_... (HEADERS, CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY, "
              "COMPRESSION, TIMEOUT) hold. Default: OTEL_EXPORTER_OTLP_ENDPOINT, else no traces.");
  table.Number("trace_sample", options.trace.sample, 0, 1,
               "Fraction of the calls without a traceparent header that are traced; 0: what "
               "OTEL_TRACES_SAMPLER says, else none. Calls with the header are traced if it says "
               "so.");
}

}  // namespace

void AddFlags(CLI::App* app, Options* options) {
  FlagTable table(app);
  AddModelFlags(table, *options);
  AddDeviceFlags(table, *options);
  AddListenFlags(table, *options);
  AddSecurityFlags(table, options->rpc.transport.security);
  AddClientFlags(table, options->rpc.transport.client);
  AddLimitFlags(table, *options);
  AddSharedMemoryFlags(table, options->rpc.shared_memory);
  AddRingFlags(table, options->rpc.ring);
  AddLendingFlags(table, options->rpc.lend_path);
  AddBatchFlags(table, *options);
  AddLifecycleFlags(table, *options);
  AddLogFlags(table, *options);
}

}  // namespace awqd
