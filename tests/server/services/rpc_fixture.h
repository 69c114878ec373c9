// RpcTest: a gRPC server on a real port, over a FakeEngine and a model "tiny" with one weight
// "layer" (K = 128, N = 16) and one "wide" (K = 128, N = 4096).
#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/services/rpc_server.h"
#include "tests/server/requests.h"
#include "tests/server/services/fake_engine.h"
#include "tests/testing/eventually.h"

namespace awqd::services {

// Writes a checkpoint of zeros with linears of these paths and N.
inline void WriteTinyModel(const std::filesystem::path& dir,
                           const std::vector<std::pair<std::string, int64_t>>& linears = {
                               {"layer", 16}, {"wide", 4096}}) {
  std::filesystem::create_directories(dir);
  std::ofstream(dir / "config.json")
      << R"({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,)"
      << R"( "zero_point": true, "version": "gemm"}})";
  std::string header = "{";
  int64_t offset = 0;
  const auto add = [&](const std::string& name, const std::string& dtype, int64_t rows,
                       int64_t cols, int64_t size) {
    const int64_t end = offset + rows * cols * size;
    header += (offset == 0 ? "\"" : ", \"") + name + R"(": {"dtype": ")" + dtype +
              R"(", "shape": [)" + std::to_string(rows) + ", " + std::to_string(cols) +
              R"(], "data_offsets": [)" + std::to_string(offset) + ", " + std::to_string(end) +
              "]}";
    offset = end;
  };
  for (const auto& [path, n] : linears) {
    add(path + ".qweight", "I32", 128, n / 8, 4);
    add(path + ".qzeros", "I32", 1, n / 8, 4);
    add(path + ".scales", "F16", 1, n, 2);
  }
  header += "}";
  const uint64_t size = header.size();
  std::ofstream file(dir / "model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header << std::string(offset, '\0');
}

class RpcTest : public ::testing::Test {
 protected:
  static constexpr int64_t kMessageLimit = 1 << 20;

  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) /
            ("awqd_rpc_" + std::to_string(::getpid()) + "_" +
             ::testing::UnitTest::GetInstance()->current_test_info()->name());
    WriteTinyModel(root_ / "tiny");
    models_ = std::make_unique<repository::ModelStore>(root_.string(), engine_.mutable_device());
    ASSERT_TRUE(models_->Load("tiny").ok());
    Options options;
    options.transport.addresses = {"127.0.0.1:0"};
    options.transport.max_receive_message_bytes = kMessageLimit;
    options.transport.max_send_message_bytes = kMessageLimit;
    options.stream_in_flight = 4;
    options.chunk_bytes = 64 << 10;
    options.max_inline_weight_bytes = 1 << 16;
    Configure(&options);
    absl::StatusOr<std::unique_ptr<RpcServer>> server =
        RpcServer::Start(options, &engine_, models_.get());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    grpc::ChannelArguments args = ChannelArguments();
    args.SetMaxReceiveMessageSize(-1);
    channel_ =
        grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), args);
    stub_ = v1::QuantizedInference::NewStub(channel_);
    repository_ = v1::ModelRepository::NewStub(channel_);
  }

  void TearDown() override {
    if (server_ != nullptr) server_->Shutdown(absl::Seconds(5));
    std::filesystem::remove_all(root_);
  }

  virtual void Configure(Options*) {}
  virtual grpc::ChannelArguments ChannelArguments() { return {}; }  // of channel_

  static void Deadline(grpc::ClientContext* context, int ms = 10000) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(ms));
  }

  grpc::Status Matmul(const v1::QuantizedMatmulRequest& request,
                      v1::QuantizedMatmulResponse* response) {
    grpc::ClientContext context;
    Deadline(&context);
    return stub_->QuantizedMatmul(&context, request, response);
  }

  FakeEngine engine_;
  std::filesystem::path root_;
  std::unique_ptr<repository::ModelStore> models_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
  std::unique_ptr<v1::ModelRepository::Stub> repository_;
};

}  // namespace awqd::services
