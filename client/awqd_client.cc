// The client over gRPC's synchronous stubs.
#include "client/awqd_client.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "client/convert.h"
#include "client/credentials.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "kernels/base/status.h"

namespace awqd::client {
namespace {

// Answers up to this size come as one message: well below the knee above which Protocol Buffers
// reallocate, and below the library's 4 MiB default that a server may have kept.
constexpr int64_t kOneMessageBytes = int64_t{2} << 20;

// The schemes of gRPC's targets.
constexpr absl::string_view kSchemes[] = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "xds"};

absl::Status CheckAddress(absl::string_view address) {
  if (absl::StartsWith(address, "/")) {
    return Invalid("address: got '", address, "', expected 'unix:", address, "' for a UNIX socket");
  }
  if (absl::StartsWith(address, "unix:")) {
    if (address.size() > 5) return absl::OkStatus();
  } else if (const size_t scheme = address.find("://");
             scheme != address.npos &&
             !absl::c_linear_search(kSchemes, address.substr(0, scheme))) {
    return Invalid("address: got '", address, "', expected host:port without '",
                   address.substr(0, scheme + 3), "'; TLS is asked for by tls_ca");
  } else {
    const size_t colon = address.rfind(':');
    int port = 0;
    if (colon != absl::string_view::npos && colon > 0 &&
        absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 && port < 65536) {
      return absl::OkStatus();
    }
  }
  return Invalid("address: got '", address,
                 "', expected host:port (port 1 to 65535) or unix:/path");
}

grpc::ChannelArguments ChannelArgs(const ClientOptions& options) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(options.max_receive_bytes));
  args.SetMaxSendMessageSize(-1);  // the server states its own limit, with a better message
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // an inference server is not behind a web proxy
  // A connection per client: another client's failure must not delay this one's next attempt.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const int longest = static_cast<int>(absl::ToInt64Milliseconds(options.max_reconnect_delay));
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, std::min(100, longest));
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, longest);
  // Finds a dead peer under a call without a deadline. Servers refuse pings more often than every
  // five minutes unless told otherwise, so idle connections send none.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5 * 60 * 1000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20 * 1000);
  args.SetInt("grpc.http2.ping_timeout_ms", 20 * 1000);  // which newer gRPC takes in its place
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  return args;
}

using InferenceStub = v1::QuantizedInference::Stub;
using RepositoryStub = v1::ModelRepository::Stub;

template <typename Request>
Request Named(absl::string_view model) {
  Request request;
  request.set_name(std::string(model));
  return request;
}

class StreamOverGrpc : public MatmulStream {
 public:
  // `stub` must outlive it.
  StreamOverGrpc(v1::QuantizedInference::Stub& stub, const Credentials& credentials,
                 const CallOptions& options, int64_t max_receive_bytes)
      : credentials_(credentials), max_receive_bytes_(max_receive_bytes) {
    Prepare(context_, options);
    credentials.Authorize(context_);
    stream_ = stub.QuantizedMatmulStream(&context_);
  }
  ~StreamOverGrpc() override {
    if (finished_) return;
    context_.TryCancel();
    // gRPC wants a stream read to its end and finished before it goes.
    v1::QuantizedMatmulResponse unread;
    while (stream_->Read(&unread)) {
    }
    stream_->Finish().IgnoreError();
  }

  absl::Status Send(MatmulCall call) override {
    const v1::QuantizedMatmulRequest request = ToRequest(std::move(call));
    AWQD_RETURN_IF_ERROR(CheckSize(request));
    if (stream_->Write(request)) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Receive tells why");
  }

  absl::Status CloseSend() override {
    if (stream_->WritesDone()) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Receive tells why");
  }

  absl::StatusOr<std::optional<Answer>> Receive() override {
    v1::QuantizedMatmulResponse response;
    if (finished_ || !stream_->Read(&response)) return End();
    if (response.has_error()) {
      return Answer{response.request_id(), FromProto(response.error())};
    }
    std::string id = response.request_id();
    return Answer{std::move(id), ToResult(std::move(response))};
  }

  void Cancel() override { context_.TryCancel(); }

 private:
  absl::StatusOr<std::optional<Answer>> End() {
    if (!finished_) {
      finished_ = true;
      final_ = credentials_.WithQuestion(FromGrpc(stream_->Finish(), max_receive_bytes_));
    }
    if (!final_.ok()) return final_;
    return std::nullopt;
  }

  const Credentials credentials_;
  const int64_t max_receive_bytes_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>>
      stream_;
  bool finished_ = false;
  absl::Status final_;
};

class RegionOverGrpc : public SharedRegion {
 public:
  ~RegionOverGrpc() override {
    context_.TryCancel();
    (void)End();
  }
  grpc::ClientContext* context() { return &context_; }

  // Once. OK: the region is there.
  grpc::Status Start(InferenceStub& stub, const v1::ShareMemoryRequest& request,
                     absl::Time deadline) {
    reader_ = stub.AsyncShareMemory(&context_, request, &queue_, this);
    if (Wait(absl::InfiniteFuture()) != Event::kDone) return End();
    Read();
    const Event answered = Wait(deadline);
    if (answered == Event::kDone) {
      Read();
      return grpc::Status::OK;
    }
    if (answered == Event::kFailed) return End();
    context_.TryCancel();
    (void)End();
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"};
  }
  bool alive() const override {
    const std::lock_guard<std::mutex> lock(mu_);
    return reading_ && Wait(absl::UnixEpoch()) == Event::kNone;
  }

 private:
  enum class Event { kNone, kDone, kFailed };

  // The end of the operation in progress; none by the deadline.
  Event Wait(absl::Time deadline) const {
    void* tag = nullptr;
    bool ok = false;
    switch (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(deadline))) {
      case grpc::CompletionQueue::GOT_EVENT:
        reading_ = false;
        return ok ? Event::kDone : Event::kFailed;
      case grpc::CompletionQueue::TIMEOUT:
        return Event::kNone;
      default:
        return Event::kFailed;
    }
  }
  void Read() {
    reading_ = true;
    reader_->Read(&answer_, this);
  }
  // Once: the call's status, when it has ended.
  grpc::Status End() {
    if (reader_ == nullptr) return grpc::Status::OK;
    if (reading_) Wait(absl::InfiniteFuture());
    grpc::Status status;
    reader_->Finish(&status, this);
    Wait(absl::InfiniteFuture());
    queue_.Shutdown();
    Wait(absl::InfiniteFuture());
    reader_ = nullptr;
    return status;
  }

  grpc::ClientContext context_;
  mutable grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::ShareMemoryResponse>> reader_;
  v1::ShareMemoryResponse answer_;
  mutable std::mutex mu_;
  mutable bool reading_ = false;
};

class ClientOverGrpc : public Client {
 public:
  ClientOverGrpc(std::shared_ptr<grpc::Channel> channel, Credentials credentials,
                 const ClientOptions& options)
      : channel_(std::move(channel)),
        credentials_(std::move(credentials)),
        timeout_(options.timeout),
        max_receive_bytes_(options.max_receive_bytes),
        weight_key_(options.weight_key),
        inference_(v1::QuantizedInference::NewStub(channel_)),
        repository_(v1::ModelRepository::NewStub(channel_)),
        server_info_(v1::ServerInfo::NewStub(channel_)),
        health_(grpc::health::v1::Health::NewStub(channel_)) {}

  absl::StatusOr<MatmulResult> QuantizedMatmul(MatmulCall call,
                                               const CallOptions& options) override {
    return Product(&InferenceStub::QuantizedMatmul, std::move(call), options);
  }

  absl::StatusOr<MatmulResult> GroupedQuantizedMatmul(GroupedMatmulCall call,
                                                      const CallOptions& options) override {
    return Product(&InferenceStub::GroupedQuantizedMatmul, std::move(call), options);
  }

  absl::StatusOr<MatmulResult> GatedMlp(GatedMlpCall call, const CallOptions& options) override {
    return Product(&InferenceStub::GatedMlp, std::move(call), options);
  }

  std::unique_ptr<MatmulStream> QuantizedMatmulStream(const CallOptions& options) override {
    return std::make_unique<StreamOverGrpc>(*inference_, credentials_, WithTimeout(options),
                                            max_receive_bytes_);
  }

  absl::StatusOr<DequantizeResult> Dequantize(const DequantizeCall& call,
                                              const CallOptions& options) override {
    const int64_t bytes = KnownAnswerBytes(call);
    if (!call.shared_output && (bytes < 0 || bytes > kOneMessageBytes)) {
      return DequantizeIntoMemory(call, options);
    }
    AWQD_ASSIGN_OR_RETURN(auto response,
                          Unary(*inference_, &InferenceStub::Dequantize, ToRequest(call), options));
    AWQD_ASSIGN_OR_RETURN(Tensor output, ToOutput(std::move(*response.mutable_output())));
    return DequantizeResult{std::move(output), response.execution()};
  }

  absl::StatusOr<v1::Execution> DequantizeBlocks(const DequantizeCall& call, const BlockSink& sink,
                                                 const CallOptions& options) override {
    const v1::DequantizeRequest request = ToRequest(call);
    AWQD_RETURN_IF_ERROR(CheckSize(request));
    grpc::ClientContext context;
    Begin(context, options, request);
    const auto reader = inference_->DequantizeStream(&context, request);
    ChunkOrder order;
    v1::Execution execution;
    absl::Status failure;
    v1::DequantizeChunk chunk;
    while (reader->Read(&chunk)) {
      if (!failure.ok()) continue;  // cancelled: read on to the end
      if (chunk.has_execution()) execution = chunk.execution();
      absl::StatusOr<DequantizeBlock> block = order.Accept(std::move(chunk));
      failure = block.ok() ? sink(*std::move(block)) : block.status();
      if (!failure.ok()) context.TryCancel();
    }
    const absl::Status status =
        credentials_.WithQuestion(FromGrpc(reader->Finish(), max_receive_bytes_));
    if (!failure.ok()) return failure;
    if (!status.ok()) return status;
    AWQD_RETURN_IF_ERROR(order.Finish());
    return execution;
  }

  absl::StatusOr<QuantizeKvResult> QuantizeKv(QuantizeKvCall call,
                                              const CallOptions& options) override {
    return Product(&InferenceStub::QuantizeKv, std::move(call), options);
  }

  absl::StatusOr<DequantizeKvResult> DequantizeKv(DequantizeKvCall call,
                                                  const CallOptions& options) override {
    AWQD_ASSIGN_OR_RETURN(auto response, Unary(*inference_, &InferenceStub::DequantizeKv,
                                               ToRequest(std::move(call)), options));
    AWQD_ASSIGN_OR_RETURN(Tensor output, FromProto(std::move(*response.mutable_output())));
    return DequantizeKvResult{std::move(output), response.execution()};
  }

  absl::StatusOr<std::unique_ptr<SharedRegion>> ShareMemory(const v1::ShareMemoryRequest& request,
                                                            const CallOptions& options) override {
    auto region = std::make_unique<RegionOverGrpc>();
    // The call lasts as long as the region, its answer has a deadline.
    Begin(*region->context(), {.timeout = absl::InfiniteDuration()}, request);
    const absl::Time deadline = absl::Now() + WithTimeout(options).timeout;
    const grpc::Status status = region->Start(*inference_, request, deadline);
    if (status.ok()) return region;
    return credentials_.WithQuestion(FromGrpc(status, max_receive_bytes_));
  }

  absl::StatusOr<v1::ListModelsResponse> ListModels(const CallOptions& options) override {
    return Unary(*repository_, &RepositoryStub::ListModels, {}, options);
  }

  absl::StatusOr<v1::GetModelResponse> GetModel(absl::string_view name,
                                                const CallOptions& options) override {
    const absl::Time deadline = absl::Now() + WithTimeout(options).timeout;
    for (;;) {
      absl::StatusOr<v1::GetModelResponse> model = AllPages(name, options, deadline);
      // The model was loaded anew between two pages: from the beginning, while there is time.
      if (!absl::IsAborted(model.status())) return model;
    }
  }

  absl::StatusOr<v1::LoadModelResponse> LoadModel(absl::string_view name,
                                                  const CallOptions& options,
                                                  bool require_all_weights) override {
    auto request = Named<v1::LoadModelRequest>(name);
    request.set_require_all_weights(require_all_weights);
    return Unary(*repository_, &RepositoryStub::LoadModel, request, options);
  }

  absl::Status UnloadModel(absl::string_view name, const CallOptions& options) override {
    return Unary(*repository_, &RepositoryStub::UnloadModel, Named<v1::UnloadModelRequest>(name),
                 options)
        .status();
  }

  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& options) override {
    return Unary(*server_info_, &v1::ServerInfo::Stub::GetServerInfo, {}, options);
  }

  absl::StatusOr<bool> IsServing(absl::string_view service, const CallOptions& options) override {
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(std::string(service));
    AWQD_ASSIGN_OR_RETURN(
        auto response, Unary(*health_, &grpc::health::v1::Health::Stub::Check, request, options));
    return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  }

  bool connected() const override { return channel_->GetState(false) == GRPC_CHANNEL_READY; }

 private:
  absl::StatusOr<v1::GetModelResponse> AllPages(absl::string_view name, CallOptions options,
                                                absl::Time deadline) {
    auto request = Named<v1::GetModelRequest>(name);
    v1::GetModelResponse all;
    do {
      options.timeout = std::max(deadline - absl::Now(), absl::Nanoseconds(1));
      AWQD_ASSIGN_OR_RETURN(auto page,
                            Unary(*repository_, &RepositoryStub::GetModel, request, options));
      if (!page.next_page_token().empty() && page.next_page_token() == request.page_token()) {
        return absl::InternalError("GetModel: the server answers with the same page again");
      }
      request.set_page_token(page.next_page_token());
      page.clear_next_page_token();
      all.MergeFrom(page);
    } while (!request.page_token().empty());
    return all;
  }

  CallOptions WithTimeout(CallOptions options) const {
    if (options.timeout == absl::ZeroDuration()) options.timeout = timeout_;
    return options;
  }

  template <typename Request>
  void Begin(grpc::ClientContext& context, const CallOptions& options, const Request& request) {
    Prepare(context, WithTimeout(options));
    credentials_.Authorize(context);
    if (weight_key_) AddWeightKey(WeightKeyOf(request), context);
  }

  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Unary(
      Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      const std::type_identity_t<Request>& request, const CallOptions& options) {
    AWQD_RETURN_IF_ERROR(CheckSize(request));
    grpc::ClientContext context;
    Begin(context, options, request);
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (!status.ok()) {
      return credentials_.WithQuestion(FromGrpc(context, status, max_receive_bytes_));
    }
    return response;
  }

  // Calls a method whose request and answer convert.h converts.
  template <typename Request, typename Response, typename Call>
  auto Product(grpc::Status (InferenceStub::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
               Call call, const CallOptions& options) -> decltype(ToResult(Response())) {
    AWQD_ASSIGN_OR_RETURN(auto response,
                          Unary(*inference_, method, ToRequest(std::move(call)), options));
    return ToResult(std::move(response));
  }

  absl::StatusOr<DequantizeResult> DequantizeIntoMemory(const DequantizeCall& call,
                                                        const CallOptions& options) {
    Tensor whole{call.output_dtype, {}, ""};
    const BlockSink append = [&whole](DequantizeBlock block) {
      whole.dtype = block.values.dtype;
      whole.shape = {block.total_rows, block.total_columns};
      // Grow by what has arrived, up to what is announced: a false total must not allocate.
      const size_t needed = whole.bytes.size() + block.values.bytes.size();
      const double announced =
          static_cast<double>(block.total_rows) * block.total_columns * SizeOf(block.values.dtype);
      if (needed > whole.bytes.capacity()) {
        whole.bytes.reserve(announced < 2.0 * needed ? static_cast<size_t>(announced) : 2 * needed);
      }
      whole.bytes += block.values.bytes;
      return absl::OkStatus();
    };
    AWQD_ASSIGN_OR_RETURN(v1::Execution execution, DequantizeBlocks(call, append, options));
    return DequantizeResult{std::move(whole), std::move(execution)};
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const Credentials credentials_;
  const absl::Duration timeout_;
  const int64_t max_receive_bytes_;
  const bool weight_key_;
  const std::unique_ptr<v1::QuantizedInference::Stub> inference_;
  const std::unique_ptr<v1::ModelRepository::Stub> repository_;
  const std::unique_ptr<v1::ServerInfo::Stub> server_info_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const ClientOptions& options) {
  AWQD_RETURN_IF_ERROR(CheckAddress(options.address));
  if (options.timeout <= absl::ZeroDuration()) {
    return Invalid("timeout: got ", absl::FormatDuration(options.timeout),
                   ", expected more than 0");
  }
  if (options.max_receive_bytes <= 0 ||
      options.max_receive_bytes > std::numeric_limits<int>::max()) {
    return Invalid("max_receive_bytes: got ", options.max_receive_bytes,
                   ", expected 1 to 2147483647");
  }
  if (options.max_reconnect_delay < absl::Milliseconds(1) ||
      options.max_reconnect_delay > absl::Hours(1)) {
    return Invalid("max_reconnect_delay: got ", absl::FormatDuration(options.max_reconnect_delay),
                   ", expected 1 ms to 1 h");
  }
  AWQD_ASSIGN_OR_RETURN(Credentials credentials,
                        Credentials::Read(options.address, options.security));
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(options.address, credentials.channel(), ChannelArgs(options));
  return std::make_unique<ClientOverGrpc>(std::move(channel), std::move(credentials), options);
}

}  // namespace awqd::client
