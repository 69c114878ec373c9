// A fake awqd in the test's process: every service, with answers that the test sets.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/model_repository.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace awqd {

// Answers with `status`, which is OK until a test sets it; products return their activations.
class FakeInference : public v1::QuantizedInference::Service {
 public:
  // A region "slow" is never ready; one without a name is refused.
  grpc::Status ShareMemory(grpc::ServerContext* context, const v1::ShareMemoryRequest* request,
                           grpc::ServerWriter<v1::ShareMemoryResponse>* writer) override {
    if (request->region().empty()) return {grpc::StatusCode::INVALID_ARGUMENT, "name: got none"};
    ++regions;
    if (request->region() != "slow") writer->Write({});
    while (!context->IsCancelled() && !end_regions) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    --regions;
    return grpc::Status::OK;
  }
  std::atomic<int> regions{0};
  std::atomic<bool> end_regions{false};

  grpc::Status QuantizedMatmul(grpc::ServerContext* context,
                               const v1::QuantizedMatmulRequest* request,
                               v1::QuantizedMatmulResponse* response) override {
    TakeKey(*context);
    {
      std::lock_guard<std::mutex> lock(mutex_);  // a bench calls from several threads at once
      last_matmul = *request;
    }
    Echo(*request, response);
    return status;
  }

  grpc::Status GroupedQuantizedMatmul(grpc::ServerContext* context,
                                      const v1::GroupedQuantizedMatmulRequest* request,
                                      v1::GroupedQuantizedMatmulResponse* response) override {
    TakeKey(*context);
    last_grouped = *request;
    Echo(*request, response);
    return status;
  }
  grpc::Status GatedMlp(grpc::ServerContext* context, const v1::GatedMlpRequest* request,
                        v1::GatedMlpResponse* response) override {
    TakeKey(*context);
    last_mlp = *request;
    Echo(*request, response);
    return status;
  }

  // One code for each byte, and no scales unless the request has none.
  grpc::Status QuantizeKv(grpc::ServerContext*, const v1::QuantizeKvRequest* request,
                          v1::QuantizeKvResponse* response) override {
    last_quantize_kv = *request;
    *response->mutable_codes() = request->block();
    response->mutable_codes()->set_dtype(v1::UINT8);
    response->mutable_codes()->mutable_raw()->resize(ElementsOf(request->block()));
    if (request->has_scales()) return status;
    for (v1::Tensor* tensor : {response->mutable_scales(), response->mutable_zeros()}) {
      tensor->set_dtype(v1::FP16);
      tensor->add_shape(1);
      tensor->set_raw("12");
    }
    return status;
  }
  grpc::Status DequantizeKv(grpc::ServerContext*, const v1::DequantizeKvRequest* request,
                            v1::DequantizeKvResponse* response) override {
    last_dequantize_kv = *request;
    *response->mutable_output() = request->codes();
    return status;
  }

  grpc::Status QuantizedMatmulStream(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::QuantizedMatmulResponse, v1::QuantizedMatmulRequest>* stream)
      override {
    v1::QuantizedMatmulRequest request;
    while (stream->Read(&request)) {
      v1::QuantizedMatmulResponse response;
      response.set_request_id(request.request_id());
      if (request.request_id() == "bad") {
        response.mutable_error()->set_code(grpc::INVALID_ARGUMENT);
        response.mutable_error()->set_message("activations: bad");
        response.mutable_error()->add_details()->set_value("detail");
      } else {
        *response.mutable_output() = request.activations();
      }
      stream->Write(response);
    }
    return status;
  }

  grpc::Status Dequantize(grpc::ServerContext*, const v1::DequantizeRequest*,
                          v1::DequantizeResponse* response) override {
    ++unary_calls;
    response->mutable_output()->set_dtype(v1::FP16);
    response->mutable_output()->add_shape(1);
    response->mutable_output()->add_shape(1);
    response->mutable_output()->set_raw(std::string("\x00\x3c", 2));
    return status;
  }

  grpc::Status DequantizeStream(grpc::ServerContext* context, const v1::DequantizeRequest* request,
                                grpc::ServerWriter<v1::DequantizeChunk>* writer) override {
    TakeKey(*context);
    ++stream_calls;
    last_dequantize = *request;
    for (const v1::DequantizeChunk& chunk : chunks) {
      if (!writer->Write(chunk)) break;
    }
    return status;
  }

  // Adds rows [begin, end) of a `total` x `columns` FP16 answer, every byte `fill`.
  void AddChunk(int64_t begin, int64_t end, int64_t total, int64_t columns, char fill = 1) {
    v1::DequantizeChunk chunk;
    chunk.mutable_rows()->set_begin(begin);
    chunk.mutable_rows()->set_end(end);
    chunk.mutable_columns()->set_end(columns);
    chunk.set_total_rows(total);
    chunk.set_total_columns(columns);
    chunk.mutable_output()->set_dtype(v1::FP16);
    chunk.mutable_output()->add_shape(end - begin);
    chunk.mutable_output()->add_shape(columns);
    chunk.mutable_output()->set_raw(std::string((end - begin) * columns * 2, fill));
    chunk.mutable_execution()->set_kernel("fake/dequantize");
    chunks.push_back(std::move(chunk));
  }

  grpc::Status status;
  std::vector<v1::DequantizeChunk> chunks;
  int unary_calls = 0;
  int stream_calls = 0;
  v1::QuantizedMatmulRequest last_matmul;
  v1::GroupedQuantizedMatmulRequest last_grouped;
  v1::GatedMlpRequest last_mlp;
  v1::QuantizeKvRequest last_quantize_kv;
  v1::DequantizeKvRequest last_dequantize_kv;
  v1::DequantizeRequest last_dequantize;
  std::atomic<int> keyed_calls = 0;  // that weight_keys tells of
  // The keys of the calls above, in their order; "" for a call without one.
  std::vector<std::string> weight_keys;

 private:
  void TakeKey(const grpc::ServerContext& context) {
    const auto found = context.client_metadata().find("awqd-weight");
    std::lock_guard<std::mutex> lock(mutex_);
    ++keyed_calls;
    weight_keys.emplace_back(found == context.client_metadata().end()
                                 ? ""
                                 : std::string(found->second.data(), found->second.size()));
  }

  template <typename Request, typename Response>
  static void Echo(const Request& request, Response* response) {
    *response->mutable_output() = request.activations();
    if (request.output_dtype() == v1::BF16) response->mutable_output()->set_dtype(v1::BF16);
    response->mutable_execution()->set_kernel("fake/echo");
    response->mutable_execution()->set_path(v1::FUSED);
    response->mutable_execution()->set_device("cpu");
    response->set_request_id(request.request_id());
  }

  static size_t ElementsOf(const v1::Tensor& tensor) {
    size_t elements = 1;
    for (const int64_t dim : tensor.shape()) elements *= dim;
    return elements;
  }

  std::mutex mutex_;
};

// One model "m" with one weight "w", K = 4 until a test sets it.
class FakeRepository : public v1::ModelRepository::Service {
 public:
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override {
    v1::ModelSummary& model = *response->add_models();
    model.set_name("m");
    model.set_state(share < 1 ? v1::LOADING : v1::READY);
    model.set_loaded_share(share);
    model.set_message("a\x1b[31mb");
    return status;
  }
  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest* request,
                        v1::GetModelResponse* response) override {
    if (request->name() != "m") return {grpc::NOT_FOUND, "model 'x' is not loaded"};
    response->mutable_model()->set_name("m");
    v1::WeightInfo& weight = *response->add_weights();
    weight.set_path("w");
    weight.set_k(k);
    weight.set_n(4);
    v1::PlanEntry& plan = *weight.add_plan();
    plan.set_path(v1::FUSED);
    plan.set_max_tokens(255);
    plan.set_kernel("fake/echo");
    plan.set_tiles("1-128: 8x64");
    response->MergeFrom(more);
    return Page(*request, response);
  }
  // One weight a page, if there are pages; the token is the weight's index. The first page that
  // follows another is refused `reloads` times, as if the model was reloaded.
  grpc::Status Page(const v1::GetModelRequest& request, v1::GetModelResponse* response) {
    if (!paged) return status;
    const int index = request.page_token().empty() ? 0 : std::stoi(request.page_token());
    if (index > 0 && reloads-- > 0) return {grpc::ABORTED, "the model was loaded anew"};
    const v1::WeightInfo weight = response->weights(index);
    if (index + 1 < response->weights_size()) {
      response->set_next_page_token(std::to_string(index + 1));
    }
    response->clear_weights();
    *response->add_weights() = weight;
    return status;
  }
  grpc::Status LoadModel(grpc::ServerContext*, const v1::LoadModelRequest* request,
                         v1::LoadModelResponse* response) override {
    response->mutable_model()->set_name(request->name());
    require_all_weights = request->require_all_weights();
    return status;
  }
  grpc::Status UnloadModel(grpc::ServerContext*, const v1::UnloadModelRequest*,
                           v1::UnloadModelResponse*) override {
    return status;
  }

  grpc::Status status;
  int64_t k = 4;
  float share = 1;                   // the loaded share of "m"
  bool require_all_weights = false;  // of the last LoadModel
  v1::GetModelResponse more;         // for "m"
  bool paged = false;
  int reloads = 0;
};

class FakeServerInfo : public v1::ServerInfo::Service {
 public:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->set_version("9.9.9");
    v1::KernelInfo& kernel = *response->add_kernels();
    kernel.set_name("fake/echo");
    kernel.set_operation("matmul");
    kernel.set_path("fused");
    kernel.set_max_tokens(255);
    kernel.set_reason("no | GPU");
    response->add_devices()->set_id("cpu");
    response->MergeFrom(more);
    *response->mutable_counters() = counters;
    std::lock_guard<std::mutex> lock(mutex_);
    if (between) between(&counters);
    return grpc::Status::OK;
  }

  v1::Counters counters;
  v1::GetServerInfoResponse more;
  // Changes the counters after each answer.
  std::function<void(v1::Counters*)> between;

 private:
  std::mutex mutex_;
};

class FakeHealth : public grpc::health::v1::Health::Service {
 public:
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    if (request->service() == "unknown") return {grpc::NOT_FOUND, "unknown service"};
    ++checks;
    response->set_status(checks > not_serving_first
                             ? grpc::health::v1::HealthCheckResponse::SERVING
                             : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }

  int checks = 0;
  int not_serving_first = 0;
};

// Listens on a free loopback port until destroyed.
class FakeServer {
 public:
  FakeServer() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&inference);
    builder.RegisterService(&repository);
    builder.RegisterService(&info);
    builder.RegisterService(&health);
    server_ = builder.BuildAndStart();
    address = absl::StrCat("127.0.0.1:", port);
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2)); }

  FakeInference inference;
  FakeRepository repository;
  FakeServerInfo info;
  FakeHealth health;
  std::string address;

 private:
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace awqd
