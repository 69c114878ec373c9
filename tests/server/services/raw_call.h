// Calls by method name, for methods and bytes that no stub would send, and the list of methods that
// reflection returns.
#pragma once

#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpcpp/channel.h"
#include "gtest/gtest.h"

namespace awqd::services {

inline std::string BytesOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!message.Valid() || !message.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return bytes;
}

inline grpc::ByteBuffer MessageOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Sends one request and reads at most one answer, for any kind of method.
inline grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel,
                            const std::string& method, const std::string& payload,
                            std::string* answer = nullptr) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  grpc::ByteBuffer response;
  grpc::Status status;
  const auto call = stub.PrepareUnaryCall(&context, method, MessageOf(payload), &queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (answer != nullptr) *answer = BytesOf(response);
  return status;
}

// A stream of any method, one step at a time.
class RawStream {
 public:
  RawStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method)
      : stub_(channel) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    call_ = stub_.PrepareCall(&context_, method, &queue_);
    call_->StartCall(nullptr);
    EXPECT_TRUE(Next());
  }

  bool Write(const std::string& payload) {
    call_->Write(MessageOf(payload), nullptr);
    return Next();
  }
  bool WritesDone() {
    call_->WritesDone(nullptr);
    return Next();
  }
  bool Read(std::string* answer) {
    grpc::ByteBuffer message;
    call_->Read(&message, nullptr);
    const bool ok = Next();
    *answer = BytesOf(message);
    return ok;
  }
  void Cancel() { context_.TryCancel(); }
  grpc::Status Finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Next();
    return status;
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

inline constexpr char kReflection[] = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
inline constexpr char kReflectionAlpha[] =
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

inline grpc::reflection::v1::ServerReflectionResponse Reflect(
    const std::shared_ptr<grpc::Channel>& channel,
    const grpc::reflection::v1::ServerReflectionRequest& request,
    const std::string& method = kReflection) {
  std::string answer;
  const grpc::Status status = RawCall(channel, method, request.SerializeAsString(), &answer);
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::reflection::v1::ServerReflectionResponse response;
  EXPECT_TRUE(response.ParseFromString(answer));
  return response;
}

inline std::vector<std::string> ServicesByReflection(const std::shared_ptr<grpc::Channel>& channel,
                                                     const std::string& method = kReflection) {
  grpc::reflection::v1::ServerReflectionRequest request;
  request.set_list_services("");
  std::vector<std::string> names;
  const auto response = Reflect(channel, request, method);
  for (const auto& service : response.list_services_response().service()) {
    names.push_back(service.name());
  }
  return names;
}

// "package.Service/Method" for all methods that the server describes.
inline std::set<std::string> MethodsByReflection(const std::shared_ptr<grpc::Channel>& channel) {
  std::set<std::string> methods;
  for (const std::string& name : ServicesByReflection(channel)) {
    grpc::reflection::v1::ServerReflectionRequest request;
    request.set_file_containing_symbol(name);
    const auto response = Reflect(channel, request);
    const auto& files = response.file_descriptor_response().file_descriptor_proto();
    google::protobuf::DescriptorPool pool;
    for (auto file = files.rbegin(); file != files.rend(); ++file) {  // imports come last
      google::protobuf::FileDescriptorProto proto;
      EXPECT_TRUE(proto.ParseFromString(*file));
      EXPECT_NE(pool.BuildFile(proto), nullptr) << proto.name();
    }
    const google::protobuf::ServiceDescriptor* service = pool.FindServiceByName(name);
    if (service == nullptr) {
      ADD_FAILURE() << "reflection lists " << name << " and does not describe it";
      continue;
    }
    for (int i = 0; i < service->method_count(); ++i) {
      methods.insert(absl::StrCat(name, "/", service->method(i)->name()));
    }
  }
  return methods;
}

}  // namespace awqd::services
