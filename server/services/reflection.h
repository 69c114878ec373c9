// The standard reflection service, grpc.reflection.v1 and its older package v1alpha, whose messages
// are the same.
//
// Our own instead of gRPC's, which keeps a thread for each open stream and does not pass admission.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/descriptor.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "server/transport/admission.h"
#include "server/transport/byte_budget.h"
#include "server/transport/call_loop.h"

namespace awqd::services {

// The schemes of the server's services, from the descriptors that are linked in.
// Thread-safe. Built once, with a pool of its own: a search then takes no lock, and files are
// serialized already, because answers are made on the threads that serve products.
class Schema {
 public:
  // Serialized FileDescriptorProtos: the file asked for, then all that it imports.
  using Files = std::vector<absl::string_view>;

  // The files of `services`, by full name, and of the details that errors carry.
  explicit Schema(const std::vector<std::string>& services);

  // NOT_FOUND for a name that these files do not have.
  absl::StatusOr<Files> FindFileByName(const std::string& name) const;
  absl::StatusOr<Files> FindFileBySymbol(const std::string& symbol) const;
  absl::StatusOr<Files> FindFileByExtension(const std::string& type, int number) const;
  absl::StatusOr<std::vector<int>> ListExtensions(const std::string& type) const;

 private:
  using File = google::protobuf::FileDescriptor;

  void AddFile(const File* file);
  // `field` of the request asked for `name`; null: there is none.
  absl::StatusOr<Files> WithImports(const File* file, absl::string_view field,
                                    absl::string_view name) const;

  google::protobuf::DescriptorPool pool_;
  std::map<std::string, std::string> serialized_;  // by the name of the file
};

// Thread-safe. Outlives the gRPC server.
class ReflectionService {
 public:
  using Request = grpc::reflection::v1::ServerReflectionRequest;
  using Response = grpc::reflection::v1::ServerReflectionResponse;

  // Streams of both packages that may be open at once; the next one is RESOURCE_EXHAUSTED.
  static constexpr int kMaxOpen = 32;

  // Tells of the services whose methods have been served by now, and of itself.
  // A stream that asks for nothing for `idle_limit` ends with UNAVAILABLE. Answers count in
  // `in_flight` until they were sent.
  ReflectionService(transport::Admission* admission, transport::ByteBudget* in_flight,
                    absl::Duration idle_limit);

  void ServeOn(transport::CallLoop* loop);

  // The answer to one request of a stream.
  Response Answer(const Request& request) const;

 private:
  class Stream;

  void Start(transport::StreamCall* call);

  transport::Drain* const gate_;
  transport::ByteBudget* const in_flight_;
  const absl::Duration idle_limit_;
  const std::vector<std::string> services_;
  const Schema schema_;
  std::atomic<int> open_{0};
};

}  // namespace awqd::services
