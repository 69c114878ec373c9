// The list of methods that reflection returns.
#pragma once

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
#include "tests/server/raw_call.h"

namespace awqd::services {

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
