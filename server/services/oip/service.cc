// The methods: ModelInfer and ModelStreamInfer, whose requests become requests of awqd.v1 in their
// codec, and are handled as those are; then the small methods about the server and its regions.
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/status.h"
#include "server/obs/call_recorder.h"
#include "server/obs/logging.h"
#include "server/services/call_handlers.h"
#include "server/services/env.h"
#include "server/services/memory/regions.h"
#include "server/services/methods.h"
#include "server/services/oip/models.h"
#include "server/services/unary.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/status.h"

namespace awqd::services::oip {
namespace {

using security::Need;
using transport::ServerCall, transport::StreamCall, transport::UnaryCall;

// --- Inference ---

// The surroundings of a request.
struct Context {
  const Env& env;
  wire::oip::Frame frame;
};

template <typename Request>
class OipCodec final : public Codec<Request> {
 public:
  explicit OipCodec(Context context) : context_(std::move(context)) {}

  const google::protobuf::Descriptor& type() const override {
    return *inference::ModelInferRequest::descriptor();
  }
  wire::PayloadPlace payload() const override { return wire::oip::kRawInputs; }
  absl::Status Decode(const wire::RawMessage& message, const wire::FieldScan& scan,
                      wire::ParsedRequest<Request>* out) override {
    return wire::oip::Decode(message.pieces(), scan, out, &echo_);
  }
  // The requested version must be the one that is served.
  absl::Status CheckFound() const override {
    if (echo_.model_version.empty()) return absl::OkStatus();
    const wire::oip::ModelName name = wire::oip::SplitName(echo_.model_name);
    return FindModel(context_.env, name.model, echo_.model_version, "model_name").status();
  }
  std::string PeekId(wire::Pieces pieces) const override { return wire::oip::PeekId(pieces); }
  grpc::ByteBuffer Encode(const std::string& id, const engine::ExecutionReport& report,
                          const wire::Answer& answer, engine::StagingPool* staging) override {
    return wire::oip::Encode(echo_, id, report, answer, context_.frame, staging);
  }
  absl::Status EncodeError(const absl::Status& status) const override {
    return wire::oip::EncodeError(status);
  }

 private:
  const Context context_;
  wire::oip::Echo echo_;
};

// The message keeps its bytes.
wire::oip::Kind PeekKind(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Valid() || !message.Dump(&slices).ok()) return wire::oip::Kind::kProduct;
  absl::InlinedVector<absl::string_view, 4> pieces;
  for (const grpc::Slice& slice : slices) {
    pieces.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return wire::oip::PeekKind(pieces);
}

// Makes the handler of a message on `call`. Takes nothing out of the message. The name of the model
// says the method; it is read before the message is admitted and parsed.
std::shared_ptr<RequestHandler> MakeHandler(Context context, absl::string_view method,
                                            ServerCall* call, const grpc::ByteBuffer& message,
                                            RequestHandler::Done done) {
  const Env& env = context.env;
  const auto make = [&](auto scheme) -> std::shared_ptr<RequestHandler> {
    using Method = decltype(scheme);
    auto codec = std::make_unique<OipCodec<typename Method::Request>>(std::move(context));
    return HandlerOf<Method>::Make(env, method, call->request_context(), std::move(codec),
                                   std::move(done));
  };
  switch (PeekKind(message)) {
    case wire::oip::Kind::kStack:
      return make(GroupedMatmulMethod());
    case wire::oip::Kind::kMlp:
      return make(GatedMlpMethod());
    case wire::oip::Kind::kDequantize:
      return make(DequantizeMethod());
    case wire::oip::Kind::kProduct:
      break;
  }
  return make(MatmulMethod());
}

// "INVALID_ARGUMENT: inputs[x]...": the protocol has no field for the code.
grpc::ByteBuffer EncodeStreamError(absl::string_view request_id, const absl::Status& status) {
  const absl::Status visible = wire::ForClient(status);
  inference::ModelStreamInferResponse response;
  response.set_error_message(
      absl::StrCat(absl::StatusCodeToString(visible.code()), ": ", visible.message()));
  response.mutable_infer_response()->set_id(std::string(request_id));
  return wire::Encode(response);
}

void ServeInfer(const Env& env) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  using wire::oip::Frame;
  env.loop->Serve<UnaryCall>(MethodPath("ModelInfer"), Need::kInfer, kMany,
                             [&env](UnaryCall* call) {
                               UnaryHandler<UnaryCall>::Start(call, [&](RequestHandler::Done done) {
                                 return MakeHandler({env, Frame::kAlone}, "ModelInfer", call,
                                                    *call->request(), std::move(done));
                               });
                             });
  env.admission->RejectWhileBusy(MethodPath("ModelInfer"));
  env.loop->Serve<StreamCall>(
      MethodPath("ModelStreamInfer"), Need::kInfer, kSome, [&env](StreamCall* call) {
        StreamProtocol protocol;
        protocol.make_handler = [&env, call](const grpc::ByteBuffer& message,
                                             RequestHandler::Done done) {
          return MakeHandler({env, Frame::kOnStream}, "ModelStreamInfer", call, message,
                             std::move(done));
        };
        protocol.encode_error = EncodeStreamError;
        protocol.in_order = true;  // clients that send no ids count on it
        HandleStream(env, call, std::move(protocol));
      });
}

// --- The server: health, metadata, settings ---

absl::Status IsLive(const Env&, const inference::ServerLiveRequest&,
                    inference::ServerLiveResponse* response) {
  response->set_live(true);
  return absl::OkStatus();
}

absl::Status IsReady(const Env& env, const inference::ServerReadyRequest&,
                     inference::ServerReadyResponse* response) {
  response->set_ready(env.ready());
  return absl::OkStatus();
}

absl::Status DescribeServer(const Env& env, const inference::ServerMetadataRequest&,
                            inference::ServerMetadataResponse* response) {
  response->set_name(kPlatform);
  response->set_version(AWQD_VERSION);
  for (const char* extension : {"model_repository", "model_configuration", "statistics",
                                "binary_tensor_data", "parameters", "trace", "logging"}) {
    response->add_extensions(extension);
  }
  if (env.shared_memory->on()) response->add_extensions("system_shared_memory");
  if (!env.options.sharing_devices.empty()) response->add_extensions("cuda_shared_memory");
  return absl::OkStatus();
}

absl::Status TellTracing(const Env& env, const inference::TraceSettingRequest& request,
                         inference::TraceSettingResponse* response) {
  for (const auto& [name, value] : request.settings()) {
    if (value.value().empty()) continue;  // to ask is to set nothing
    return wire::FieldError(absl::StrCat("settings[", obs::LogText(name, 64), "]"), "a value",
                            "none: traces are set when the server starts");
  }
  const obs::CallRecorder* const recorder = env.options.transport.recorder;
  const bool traces = recorder != nullptr && recorder->tracer() != nullptr;
  (*response->mutable_settings())["trace_level"].add_value(traces ? "TIMESTAMPS" : "OFF");
  return absl::OkStatus();
}

absl::Status TellLogging(const Env&, const inference::LogSettingsRequest& request,
                         inference::LogSettingsResponse* response) {
  for (const auto& [name, value] : request.settings()) {
    if (value.parameter_choice_case() ==
        inference::LogSettingsRequest::SettingValue::PARAMETER_CHOICE_NOT_SET) {
      continue;
    }
    return wire::FieldError(absl::StrCat("settings[", obs::LogText(name, 64), "]"), "a value",
                            "none: the log is set when the server starts");
  }
  auto& settings = *response->mutable_settings();
  settings["log_info"].set_bool_param(obs::Logs(obs::LogLevel::kInfo));
  settings["log_warning"].set_bool_param(obs::Logs(obs::LogLevel::kWarning));
  settings["log_error"].set_bool_param(obs::Logs(obs::LogLevel::kError));
  settings["log_verbose_level"].set_uint32_param(obs::Logs(obs::LogLevel::kDebug) ? 1 : 0);
  return absl::OkStatus();
}

// --- Shared memory ---

absl::StatusOr<int64_t> ToSigned(uint64_t value, absl::string_view field) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return static_cast<int64_t>(value);
  }
  return wire::FieldError(field, absl::StrCat(value), "less than 2^63");
}

// A status about the field `theirs` as one about `ours`.
absl::Status Renamed(const absl::Status& status, absl::string_view theirs, absl::string_view ours) {
  absl::string_view rest = status.message();
  if (wire::FieldOf(status) != theirs || !absl::ConsumePrefix(&rest, theirs)) return status;
  return wire::WithField(absl::Status(status.code(), absl::StrCat(ours, rest)), ours);
}

// The fields of awqd.v1.SharedMemory, as this protocol calls them.
absl::Status RenameFields(absl::Status status) {
  constexpr std::pair<absl::string_view, absl::string_view> kWords[] = {
      {"key.name", "key"}, {"key.offset", "offset"}, {"key.size", "byte_size"}};
  for (const auto& [theirs, ours] : kWords) status = Renamed(status, theirs, ours);
  return status;
}

// The range is opened once, so that the client hears now of one that cannot be used.
absl::Status RegisterSystem(const Env& env, const UnaryCall& call,
                            const inference::SystemSharedMemoryRegisterRequest& request,
                            inference::SystemSharedMemoryRegisterResponse*) {
  Region region = {.name = request.name(),
                   .key = std::string(absl::StripPrefix(request.key(), "/"))};
  AWQD_ASSIGN_OR_RETURN(region.offset, ToSigned(request.offset(), "offset"));
  AWQD_ASSIGN_OR_RETURN(region.size, ToSigned(request.byte_size(), "byte_size"));
  v1::SharedMemory range;
  range.set_name(region.key);
  range.set_offset(region.offset);
  range.set_size(region.size);
  const absl::Status opened =
      env.shared_memory->Open(range, SharedMemory::Access::kRead, "key").status();
  if (!opened.ok()) return RenameFields(opened);
  region.object = env.shared_memory->Identify(region.key);
  return env.regions->Register(OwnerName(call.identity()), std::move(region));
}

absl::Status ListSystem(const Env& env, const UnaryCall& call,
                        const inference::SystemSharedMemoryStatusRequest& request,
                        inference::SystemSharedMemoryStatusResponse* response) {
  AWQD_ASSIGN_OR_RETURN(
      const std::vector<Region> found,
      env.regions->List(OwnerName(call.identity()), request.name(), RegionKind::kSystem));
  for (const Region& region : found) {
    auto& status = (*response->mutable_regions())[region.name];
    status.set_name(region.name);
    status.set_key(region.key);
    status.set_offset(region.offset);
    status.set_byte_size(region.size);
  }
  return absl::OkStatus();
}

// The region begins where its allocation does. It ends with the connection that registered it.
absl::Status RegisterCuda(const Env& env, const UnaryCall& call,
                          const inference::CudaSharedMemoryRegisterRequest& request,
                          inference::CudaSharedMemoryRegisterResponse*) {
  if (env.options.sharing_devices.empty()) {
    return absl::UnimplementedError(
        "CUDA shared memory: this server takes none: it runs without --cuda_shared_memory, or "
        "without a GPU; use system shared memory (SystemSharedMemoryRegister) or "
        "raw_input_contents");
  }
  const std::string name = absl::StrCat("cuda:", request.device_id());
  absl::StatusOr<Device*> device = FindSharingDevice(env, name);
  if (!device.ok()) return Renamed(device.status(), "device", "device_id");
  Region region = {.name = request.name(), .registered_by = call.peer()};
  AWQD_ASSIGN_OR_RETURN(region.size, ToSigned(request.byte_size(), "byte_size"));
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> memory =
      DeviceRegion::Import(*device, {.memory = request.raw_handle(), .size = region.size});
  if (!memory.ok()) {
    return Renamed(Renamed(memory.status(), "cuda_ipc_memory", "raw_handle"), "size", "byte_size");
  }
  region.device_memory = *std::move(memory);
  return env.regions->Register(OwnerName(call.identity()), std::move(region));
}

absl::Status ListCuda(const Env& env, const UnaryCall& call,
                      const inference::CudaSharedMemoryStatusRequest& request,
                      inference::CudaSharedMemoryStatusResponse* response) {
  AWQD_ASSIGN_OR_RETURN(
      const std::vector<Region> found,
      env.regions->List(OwnerName(call.identity()), request.name(), RegionKind::kDevice));
  for (const Region& region : found) {
    auto& status = (*response->mutable_regions())[region.name];
    status.set_name(region.name);
    status.set_device_id(region.device_memory->device().info().index);
    status.set_byte_size(region.size);
  }
  return absl::OkStatus();
}

// Clients list and unregister all regions before they begin, so these work without any.
template <RegionKind kKind, typename Request, typename Response>
absl::Status Unregister(const Env& env, const UnaryCall& call, const Request& request, Response*) {
  env.regions->Unregister(OwnerName(call.identity()), request.name(), kKind);
  return absl::OkStatus();
}

}  // namespace

void Serve(const Env& env) {
  const UnaryOptions health = {.need = Need::kHealth}, infer = {.need = Need::kInfer};
  const auto serve_regions =
      [&]<typename Request, typename Response>(
          absl::string_view method,
          absl::Status (*fill)(const Env&, const UnaryCall&, const Request&, Response*)) {
        ServeUnary<Request, Response>(
            env, MethodPath(method), infer,
            [&env, fill](const UnaryCall& call, const Request& request, Response* response) {
              return fill(env, call, request, response);
            });
      };
  ServeInfer(env);
  ServeModels(env);
  ServeUnary(env, MethodPath("ServerLive"), health, IsLive);
  ServeUnary(env, MethodPath("ServerReady"), health, IsReady);
  ServeUnary(env, MethodPath("ServerMetadata"), {}, DescribeServer);
  ServeUnary(env, MethodPath("TraceSetting"), {}, TellTracing);
  ServeUnary(env, MethodPath("LogSettings"), {}, TellLogging);
  serve_regions("SystemSharedMemoryStatus", ListSystem);
  serve_regions("SystemSharedMemoryRegister", RegisterSystem);
  serve_regions("SystemSharedMemoryUnregister",
                Unregister<RegionKind::kSystem, inference::SystemSharedMemoryUnregisterRequest,
                           inference::SystemSharedMemoryUnregisterResponse>);
  serve_regions("CudaSharedMemoryStatus", ListCuda);
  serve_regions("CudaSharedMemoryRegister", RegisterCuda);
  serve_regions("CudaSharedMemoryUnregister",
                Unregister<RegionKind::kDevice, inference::CudaSharedMemoryUnregisterRequest,
                           inference::CudaSharedMemoryUnregisterResponse>);
}

}  // namespace awqd::services::oip
