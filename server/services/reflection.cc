// The standard reflection service: searches in a copy of some linked-in files, answers, and streams
// that read a request, write its answer, and only then read the next.
//
// Our own instead of gRPC's, which keeps a thread for each open stream and does not pass admission.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/info_stream.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"
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

namespace pb = ::grpc::reflection::v1;
using Request = pb::ServerReflectionRequest;
using Response = pb::ServerReflectionResponse;

// Streams of both packages that may be open at once; the next one is RESOURCE_EXHAUSTED.
constexpr int kMaxOpen = 32;

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
  return {name(pb::ServerReflectionRequest::descriptor()),
          name(grpc::reflection::v1alpha::ServerReflectionRequest::descriptor())};
}

// The descriptors of the server's services, from those that are linked in.
// Thread-safe. Built once, with a pool of its own: a search then takes no lock, and files are
// serialized already, because answers are made on the threads that serve products.
class Schema {
 public:
  // The files of `services`, by full name, and of the details that errors carry.
  explicit Schema(std::vector<std::string> services);

  // The answer to one request of a stream.
  Response Answer(const Request& request) const;

 private:
  // NOT_FOUND for a name that these files do not have.
  absl::Status Fill(const Request& request, Response* response) const;
  void AddFile(const FileDescriptor* file);
  // Adds the file, then all that it imports. `field` of the request asked for `name`; null: there
  // is none.
  absl::Status FillFiles(const FileDescriptor* file, absl::string_view field,
                         absl::string_view name, Response* response) const;
  absl::Status FillExtensions(const std::string& type, Response* response) const;

  const std::vector<std::string> services_;
  DescriptorPool pool_;
  std::map<std::string, std::string> serialized_;  // by the name of the file
};

Schema::Schema(std::vector<std::string> services) : services_(std::move(services)) {
  for (const std::string& name : services_) {
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

absl::Status Schema::FillFiles(const FileDescriptor* file, absl::string_view field,
                               absl::string_view name, Response* response) const {
  if (file == nullptr) return NotFound(field, name);
  std::vector<const FileDescriptor*> files = {file};
  pb::FileDescriptorResponse* const out = response->mutable_file_descriptor_response();
  for (size_t i = 0; i < files.size(); ++i) {
    out->add_file_descriptor_proto(serialized_.at(std::string(files[i]->name())));
    for (int d = 0; d < files[i]->dependency_count(); ++d) {
      const FileDescriptor* import = files[i]->dependency(d);
      if (std::find(files.begin(), files.end(), import) == files.end()) files.push_back(import);
    }
  }
  return absl::OkStatus();
}

absl::Status Schema::FillExtensions(const std::string& type, Response* response) const {
  const Descriptor* message = pool_.FindMessageTypeByName(type);
  if (message == nullptr) return NotFound("all_extension_numbers_of_type", type);
  std::vector<const FieldDescriptor*> extensions;
  pool_.FindAllExtensions(message, &extensions);
  pb::ExtensionNumberResponse* const out = response->mutable_all_extension_numbers_response();
  out->set_base_type_name(type);
  for (const FieldDescriptor* extension : extensions)
    out->add_extension_number(extension->number());
  return absl::OkStatus();
}

absl::Status Schema::Fill(const Request& request, Response* response) const {
  switch (request.message_request_case()) {
    case Request::kFileByFilename: {
      const std::string& name = request.file_by_filename();
      return FillFiles(pool_.FindFileByName(name), "file_by_filename", name, response);
    }
    case Request::kFileContainingSymbol: {
      const std::string& symbol = request.file_containing_symbol();
      return FillFiles(pool_.FindFileContainingSymbol(symbol), "file_containing_symbol", symbol,
                       response);
    }
    case Request::kFileContainingExtension: {
      const std::string& type = request.file_containing_extension().containing_type();
      const int number = request.file_containing_extension().extension_number();
      const Descriptor* message = pool_.FindMessageTypeByName(type);
      const FieldDescriptor* extension =
          message == nullptr ? nullptr : pool_.FindExtensionByNumber(message, number);
      return FillFiles(extension == nullptr ? nullptr : extension->file(),
                       "file_containing_extension", absl::StrCat(type, " ", number), response);
    }
    case Request::kAllExtensionNumbersOfType:
      return FillExtensions(request.all_extension_numbers_of_type(), response);
    case Request::kListServices: {
      pb::ListServiceResponse* out = response->mutable_list_services_response();
      for (const std::string& service : services_) out->add_service()->set_name(service);
      return absl::OkStatus();
    }
    case Request::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  return absl::UnimplementedError(
      "message_request: got none that this server knows, expected a file, a symbol, an extension, "
      "a type or list_services");
}

Response Schema::Answer(const Request& request) const {
  Response response;
  const absl::Status status = Fill(request, &response);
  if (!status.ok()) {
    const absl::Status visible = wire::ForClient(status);
    pb::ErrorResponse* error = response.mutable_error_response();
    error->set_error_code(wire::GrpcCode(visible.code()));
    error->set_error_message(std::string(visible.message()));
  }
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  return response;
}

// Always reads or writes, so that the end of its call, however it comes, is the end of that. A
// stream that asks for nothing for `idle_limit` ends with UNAVAILABLE. Answers count in
// Env::in_flight until they were sent.
class SchemaStream final : public InfoStream<transport::StreamCall> {
 public:
  SchemaStream(const Schema& schema, absl::Duration idle_limit, transport::StreamCall* call,
               transport::ByteLease lease, std::atomic<int>* open)
      : InfoStream(call, std::move(lease), open), schema_(schema), idle_limit_(idle_limit) {}

  void OnReadDone(bool ok) override {
    grpc::ByteBuffer answer;
    const absl::Status status = CatchExceptions([&]() -> absl::Status {
      if (!ok) return absl::OkStatus();
      AWQD_RETURN_IF_ERROR(lease_.Resize(static_cast<int64_t>(message_.Length()), "request"));
      Request request;
      AWQD_RETURN_IF_ERROR(wire::Parse(&message_, &request));
      const Response response = schema_.Answer(request);
      AWQD_RETURN_IF_ERROR(lease_.Resize(static_cast<int64_t>(response.ByteSizeLong()), "answer"));
      answer = wire::Encode(response);
      return absl::OkStatus();
    });
    MutexLock lock(&mu_);
    if (finished_) return;
    if (!ok) return EndLocked(grpc::Status::OK);
    if (!status.ok()) return EndLocked(wire::ToGrpc(status));
    Write(answer);
  }

  void OnAlarm() override {
    MutexLock lock(&mu_);
    if (finished_) return;
    const absl::Duration left = writing_ ? idle_limit_ : silent_since_ + idle_limit_ - absl::Now();
    if (left > absl::ZeroDuration()) return call_->StartAlarm(left);
    EndLocked(wire::ToGrpc(absl::UnavailableError(
        absl::StrCat("reflection: got no request for ", absl::FormatDuration(idle_limit_),
                     "; open another stream for the next"))));
  }

 private:
  void Begin() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    silent_since_ = absl::Now();
    call_->StartAlarm(idle_limit_);
    call_->StartRead(&message_);
  }
  void OnWritten() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    lease_.ShrinkTo(0);
    silent_since_ = absl::Now();
    call_->StartRead(&message_);
  }

  const Schema& schema_;
  const absl::Duration idle_limit_;
  grpc::ByteBuffer message_;  // that is being read
  absl::Time silent_since_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

void ServeReflection(const Env& env) {
  constexpr int kSlots = 4;
  // They live as long as the handlers that know them.
  struct Shared {
    explicit Shared(std::vector<std::string> services) : schema(std::move(services)) {}
    const Schema schema;
    std::atomic<int> open{0};
  };
  std::vector<std::string> services = env.admission->Services();
  const std::vector<std::string> own = OwnNames();
  services.insert(services.end(), own.begin(), own.end());
  const auto shared = std::make_shared<Shared>(std::move(services));
  for (const std::string& service : own) {
    env.loop->Serve<transport::StreamCall>(
        absl::StrCat(service, "/ServerReflectionInfo"), security::Need::kRead, kSlots,
        [&env, shared](transport::StreamCall* call) {
          // Taken here and not by each request: those of a stream that tells of methods are not
          // counted.
          absl::StatusOr<transport::ByteLease> lease =
              env.in_flight->AcquireBytes(call->charge(), 0, "request");
          if (!lease.ok()) return call->Finish(wire::ToGrpc(lease.status()));
          std::make_shared<SchemaStream>(shared->schema, env.options.reflection_idle, call,
                                         *std::move(lease), &shared->open)
              ->Start(env.admission->drain(), kMaxOpen, "reflection");
        });
  }
}

}  // namespace awqd::services
