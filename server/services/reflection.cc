// Searches in a copy of some linked-in files, answers, and streams that read a request, write its
// answer, and only then read the next.
#include "server/services/reflection.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/protobuf/descriptor.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

namespace awqd::services {

using ::google::protobuf::Descriptor;
using ::google::protobuf::DescriptorPool;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::FileDescriptor;
using ::google::protobuf::FileDescriptorProto;
using ::google::protobuf::ServiceDescriptor;

namespace {

namespace v1 = ::grpc::reflection::v1;
namespace v1alpha = ::grpc::reflection::v1alpha;
using Request = ReflectionService::Request;
using Response = ReflectionService::Response;

absl::Status NotFound(absl::string_view field, absl::string_view got) {
  return absl::NotFoundError(absl::StrCat(field, ": got \"", obs::LogText(got),
                                          "\", expected one that this server describes"));
}

// The names of both packages, from their descriptors: this links them in.
std::vector<std::string> OwnNames() {
  // Newer versions of Protocol Buffers give views of names.
  const auto name = [](const Descriptor* request) {
    return std::string(request->file()->service(0)->full_name());
  };
  return {name(v1::ServerReflectionRequest::descriptor()),
          name(v1alpha::ServerReflectionRequest::descriptor())};
}

std::vector<std::string> AndOwnNames(std::vector<std::string> services) {
  for (std::string& name : OwnNames()) services.push_back(std::move(name));
  return services;
}

absl::Status Fill(const absl::StatusOr<Schema::Files>& files, Response* response) {
  AWQD_RETURN_IF_ERROR(files.status());
  v1::FileDescriptorResponse* out = response->mutable_file_descriptor_response();
  for (const absl::string_view file : *files) out->add_file_descriptor_proto(std::string(file));
  return absl::OkStatus();
}

absl::Status Fill(const Schema& schema, const std::vector<std::string>& services,
                  const Request& request, Response* response) {
  switch (request.message_request_case()) {
    case Request::kFileByFilename:
      return Fill(schema.FindFileByName(request.file_by_filename()), response);
    case Request::kFileContainingSymbol:
      return Fill(schema.FindFileBySymbol(request.file_containing_symbol()), response);
    case Request::kFileContainingExtension: {
      const v1::ExtensionRequest& extension = request.file_containing_extension();
      return Fill(
          schema.FindFileByExtension(extension.containing_type(), extension.extension_number()),
          response);
    }
    case Request::kAllExtensionNumbersOfType: {
      const std::string& type = request.all_extension_numbers_of_type();
      AWQD_ASSIGN_OR_RETURN(const std::vector<int> numbers, schema.ListExtensions(type));
      v1::ExtensionNumberResponse* out = response->mutable_all_extension_numbers_response();
      out->set_base_type_name(type);
      for (const int number : numbers) out->add_extension_number(number);
      return absl::OkStatus();
    }
    case Request::kListServices: {
      v1::ListServiceResponse* out = response->mutable_list_services_response();
      for (const std::string& service : services) out->add_service()->set_name(service);
      return absl::OkStatus();
    }
    case Request::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  return absl::UnimplementedError(
      "message_request: got none that this server knows, expected a file, a symbol, an extension, "
      "a type or list_services");
}

}  // namespace

Schema::Schema(const std::vector<std::string>& services) {
  for (const std::string& name : services) {
    const ServiceDescriptor* service = DescriptorPool::generated_pool()->FindServiceByName(name);
    if (service != nullptr) AddFile(service->file());
  }
  AddFile(google::rpc::Status::descriptor()->file());
  AddFile(google::rpc::BadRequest::descriptor()->file());
}

void Schema::AddFile(const FileDescriptor* file) {
  const std::string name(file->name());
  if (serialized_.contains(name)) return;
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i));
  FileDescriptorProto proto;
  file->CopyTo(&proto);
  pool_.BuildFile(proto);
  serialized_[name] = proto.SerializeAsString();
}

absl::StatusOr<Schema::Files> Schema::WithImports(const FileDescriptor* file,
                                                  absl::string_view field,
                                                  absl::string_view name) const {
  if (file == nullptr) return NotFound(field, name);
  std::vector<const FileDescriptor*> files = {file};
  Files out;
  for (size_t i = 0; i < files.size(); ++i) {
    out.push_back(serialized_.at(std::string(files[i]->name())));
    for (int d = 0; d < files[i]->dependency_count(); ++d) {
      const FileDescriptor* import = files[i]->dependency(d);
      if (std::find(files.begin(), files.end(), import) == files.end()) files.push_back(import);
    }
  }
  return out;
}

absl::StatusOr<Schema::Files> Schema::FindFileByName(const std::string& name) const {
  return WithImports(pool_.FindFileByName(name), "file_by_filename", name);
}

absl::StatusOr<Schema::Files> Schema::FindFileBySymbol(const std::string& symbol) const {
  return WithImports(pool_.FindFileContainingSymbol(symbol), "file_containing_symbol", symbol);
}

absl::StatusOr<Schema::Files> Schema::FindFileByExtension(const std::string& type,
                                                          int number) const {
  const Descriptor* message = pool_.FindMessageTypeByName(type);
  const FieldDescriptor* extension =
      message == nullptr ? nullptr : pool_.FindExtensionByNumber(message, number);
  return WithImports(extension == nullptr ? nullptr : extension->file(),
                     "file_containing_extension", absl::StrCat(type, " ", number));
}

absl::StatusOr<std::vector<int>> Schema::ListExtensions(const std::string& type) const {
  const Descriptor* message = pool_.FindMessageTypeByName(type);
  if (message == nullptr) return NotFound("all_extension_numbers_of_type", type);
  std::vector<const FieldDescriptor*> extensions;
  pool_.FindAllExtensions(message, &extensions);
  std::vector<int> numbers;
  for (const FieldDescriptor* extension : extensions) numbers.push_back(extension->number());
  return numbers;
}

// Counts as open for as long as it exists. Always reads or writes, so that the end of its call,
// however it comes, is the end of that.
class ReflectionService::Stream final : public transport::Reactor,
                                        public std::enable_shared_from_this<Stream> {
 public:
  Stream(ReflectionService* service, transport::StreamCall* call)
      : service_(service), call_(call), others_(service->open_.fetch_add(1)) {}
  ~Stream() { service_->open_.fetch_sub(1); }

  // The streams that were open before it.
  int others() const { return others_; }

  // `lease`: the call's, of nothing yet.
  void Start(transport::ByteLease lease) {
    lease_ = std::move(lease);
    call_->SetReactor(this);
    {
      MutexLock lock(&mu_);
      self_ = shared_from_this();
      silent_since_ = absl::Now();
      call_->StartAlarm(service_->idle_limit_);
      call_->StartRead(&message_);
    }
    draining_ =
        std::make_unique<transport::Drain::Listener>(service_->gate_, [weak = weak_from_this()] {
          if (const auto stream = weak.lock()) stream->Drain();
        });
  }

  void OnReadDone(bool ok) override {
    grpc::ByteBuffer answer;
    const absl::Status status = CatchExceptions([&]() -> absl::Status {
      if (!ok) return absl::OkStatus();
      AWQD_RETURN_IF_ERROR(lease_.Resize(static_cast<int64_t>(message_.Length()), "request"));
      Request request;
      AWQD_RETURN_IF_ERROR(wire::Parse(&message_, &request));
      const Response response = service_->Answer(request);
      AWQD_RETURN_IF_ERROR(lease_.Resize(static_cast<int64_t>(response.ByteSizeLong()), "answer"));
      answer = wire::Encode(response);
      return absl::OkStatus();
    });
    MutexLock lock(&mu_);
    if (finished_) return;
    if (!ok) return Finish(cancelled_ ? wire::ToGrpc(Cancelled()) : grpc::Status::OK);
    if (!status.ok()) return Finish(wire::ToGrpc(status));
    writing_ = true;
    call_->StartWrite(answer);
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mu_);
    writing_ = false;
    lease_.ShrinkTo(0);
    silent_since_ = absl::Now();
    if (!ok) return Finish(wire::ToGrpc(Cancelled()));
    if (drained_) return Finish(transport::Drain::UnavailableStatus());
    call_->StartRead(&message_);
  }

  void OnAlarm() override {
    MutexLock lock(&mu_);
    if (finished_) return;
    const absl::Duration left =
        writing_ ? service_->idle_limit_ : silent_since_ + service_->idle_limit_ - absl::Now();
    if (left > absl::ZeroDuration()) return call_->StartAlarm(left);
    Finish(wire::ToGrpc(absl::UnavailableError(
        absl::StrCat("reflection: got no request for ", absl::FormatDuration(service_->idle_limit_),
                     "; open another stream for the next"))));
  }

  void OnCancel() override {
    MutexLock lock(&mu_);
    cancelled_ = true;
  }

  void OnDone() override { const std::shared_ptr<Stream> last = std::move(self_); }

 private:
  static absl::Status Cancelled() { return absl::CancelledError("the client cancelled the call"); }

  void Drain() {
    MutexLock lock(&mu_);
    drained_ = true;
    if (!writing_) Finish(transport::Drain::UnavailableStatus());
  }

  void Finish(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    call_->HurryAlarm();
    call_->FinishOnceRead(status);
  }

  ReflectionService* const service_;
  transport::StreamCall* const call_;
  const int others_;
  std::shared_ptr<Stream> self_;  // gRPC's share
  grpc::ByteBuffer message_;      // that is being read
  transport::ByteLease lease_;    // of it, then of its answer until that was written
  Mutex mu_;
  absl::Time silent_since_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool drained_ ABSL_GUARDED_BY(mu_) = false;  // the server stops
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<transport::Drain::Listener> draining_;
};

ReflectionService::ReflectionService(transport::Admission* admission,
                                     transport::ByteBudget* in_flight, absl::Duration idle_limit)
    : gate_(admission->drain()),
      in_flight_(in_flight),
      idle_limit_(idle_limit),
      services_(AndOwnNames(admission->Services())),
      schema_(services_) {}

void ReflectionService::ServeOn(transport::CallLoop* loop) {
  constexpr int kSlots = 4;
  for (const std::string& service : OwnNames()) {
    loop->Serve<transport::StreamCall>(absl::StrCat(service, "/ServerReflectionInfo"),
                                       security::Need::kRead, kSlots,
                                       [this](transport::StreamCall* call) { Start(call); });
  }
}

void ReflectionService::Start(transport::StreamCall* call) {
  // Taken here and not by each request: those of a stream that tells of methods are not counted.
  absl::StatusOr<transport::ByteLease> lease =
      in_flight_->AcquireBytes(call->charge(), 0, "request");
  if (!lease.ok()) return call->Finish(wire::ToGrpc(lease.status()));
  const auto stream = std::make_shared<Stream>(this, call);
  if (stream->others() < kMaxOpen) return stream->Start(*std::move(lease));
  call->Finish(wire::ToGrpc(absl::ResourceExhaustedError(
      absl::StrCat("reflection: got one more stream, expected at most ", kMaxOpen, " at once"))));
}

ReflectionService::Response ReflectionService::Answer(const Request& request) const {
  Response response;
  const absl::Status status = Fill(schema_, services_, request, &response);
  if (!status.ok()) {
    const absl::Status visible = wire::ForClient(status);
    v1::ErrorResponse* error = response.mutable_error_response();
    error->set_error_code(wire::GrpcCode(visible.code()));
    error->set_error_message(std::string(visible.message()));
  }
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  return response;
}

}  // namespace awqd::services
