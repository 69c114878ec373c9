// The client against services that live in the test: requests, answers, errors, streams.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "client/awqd_client.h"
#include "client/convert.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/testing/eventually.h"

namespace awqd::client {
namespace {

using ::testing::HasSubstr;

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : client_(*Client::Create({.address = server_.address})) {}

  static MatmulCall Call() {
    return {.weight = WeightName{"m", "w"},
            .activations = *Tensor::FromFloats(v1::FP16, {1, 2}, {1.0f, 2.0f}),
            .request_id = "id"};
  }

  FakeServer server_;
  std::unique_ptr<Client> client_;
};

TEST(ClientOptionsTest, RefusesWhatCannotWork) {
  for (const char* address :
       {"", "host", "host:", ":1", "host:0", "host:65536", "host:http", "/run/a.sock", "unix:"}) {
    EXPECT_EQ(Client::Create({.address = address}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
  EXPECT_THAT(Client::Create({.address = "/run/a"}).status().message(), HasSubstr("'unix:/run/a'"));
  for (const char* url : {"http://localhost:1", "https://a.b:80", "grpc://localhost:1"}) {
    EXPECT_THAT(Client::Create({.address = url}).status().message(),
                HasSubstr("expected host:port without '"))
        << url;
  }
  EXPECT_FALSE(Client::Create({.timeout = absl::ZeroDuration()}).ok());
  EXPECT_FALSE(Client::Create({.max_receive_bytes = 0}).ok());
  EXPECT_FALSE(Client::Create({.max_receive_bytes = int64_t{1} << 31}).ok());
  for (const char* address : {"localhost:1", "[::1]:80", "unix:/a", "dns:///a.b:80"}) {
    EXPECT_TRUE(Client::Create({.address = address}).ok()) << address;
  }
}

// One of a million calls whose deadlines are as long as their answers take ends like this.
TEST(ConvertTest, AnAnswerThatTheDeadlineCutIsLate) {
  const grpc::Status cut(grpc::StatusCode::UNIMPLEMENTED, "No message returned for unary request");
  grpc::ClientContext late, early;
  late.set_deadline(std::chrono::system_clock::now() - std::chrono::milliseconds(1));
  early.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  EXPECT_EQ(FromGrpc(late, cut, 1 << 20).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(FromGrpc(early, cut, 1 << 20).code(), absl::StatusCode::kUnimplemented);
  const grpc::Status unknown(grpc::StatusCode::UNIMPLEMENTED, "no such method");
  EXPECT_EQ(FromGrpc(late, unknown, 1 << 20).message(), "no such method");
}

TEST_F(ClientTest, SendsEveryFieldOfAMatmul) {
  MatmulCall call = Call();
  call.bias = *Tensor::FromFloats(v1::FP32, {2}, {3.0f, 4.0f});
  call.output_dtype = v1::FP16;
  call.path = v1::DEQUANTIZE;
  call.activation_function = v1::SILU;
  call.activation_quantization = v1::INT8_STATIC;
  call.activation_scales = *Tensor::FromFloats(v1::FP32, {1}, {0.5f});
  call.priority = -3;
  const auto result = client_->QuantizedMatmul(call);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(*result->output.ToFloats(), ::testing::ElementsAre(1.0f, 2.0f));
  EXPECT_EQ(result->execution.kernel(), "fake/echo");
  EXPECT_EQ(result->request_id, "id");
  const v1::QuantizedMatmulRequest& sent = server_.inference.last_matmul;
  EXPECT_EQ(sent.weight().model(), "m");
  EXPECT_EQ(sent.weight().weight(), "w");
  EXPECT_EQ(sent.bias().raw().size(), 8u);
  EXPECT_EQ(sent.output_dtype(), v1::FP16);
  EXPECT_EQ(sent.path(), v1::DEQUANTIZE);
  EXPECT_EQ(sent.activation_function(), v1::SILU);
  EXPECT_EQ(sent.activation_quantization(), v1::INT8_STATIC);
  EXPECT_EQ(sent.activation_scales().raw().size(), 4u);
  EXPECT_EQ(sent.priority(), -3);
  EXPECT_EQ(sent.output_encoding(), v1::RAW);
}

TEST_F(ClientTest, SendsEveryFieldOfAGroupedProductAndAnMlp) {
  const Tensor ids = {v1::INT32, {1, 2}, std::string(8, '\1')};
  const Tensor router = *Tensor::FromFloats(v1::FP32, {1, 2}, {0.25f, 0.75f});
  GroupedMatmulCall grouped = {.stack = WeightName{"m", "experts.*.up"},
                               .activations = Call().activations,
                               .routing = {ids, router},
                               .bias = router,
                               .output_dtype = v1::BF16,
                               .path = v1::FUSED,
                               .activation_function = v1::GELU,
                               .priority = 2,
                               .request_id = "g"};
  const auto y = client_->GroupedQuantizedMatmul(grouped);
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_EQ(y->request_id, "g");
  EXPECT_EQ(y->output.dtype, v1::BF16);
  const auto& sent = server_.inference.last_grouped;
  EXPECT_EQ(sent.weight().weight(), "experts.*.up");
  EXPECT_EQ(sent.expert_ids().raw(), ids.bytes);
  EXPECT_EQ(sent.router_weights().raw(), router.bytes);
  EXPECT_EQ(sent.bias().raw(), router.bytes);
  EXPECT_EQ(sent.path(), v1::FUSED);
  EXPECT_EQ(sent.activation_function(), v1::GELU);
  EXPECT_EQ(sent.priority(), 2);
  EXPECT_EQ(sent.output_encoding(), v1::RAW);

  v1::GatedMlpRef ref;
  ref.set_model("m");
  ref.set_path("mlp");
  ASSERT_TRUE(client_->GatedMlp({.mlp = ref, .activations = Call().activations}).ok());
  EXPECT_EQ(server_.inference.last_mlp.mlp().path(), "mlp");
  EXPECT_EQ(server_.inference.last_mlp.activation_function(), v1::SILU);
  EXPECT_FALSE(server_.inference.last_mlp.has_expert_ids());
  v1::PackedGatedMlp packed;
  packed.mutable_up()->add_experts()->set_format("plain");
  ASSERT_TRUE(
      client_->GatedMlp({.mlp = packed, .activations = Call().activations, .routing = Routing{ids}})
          .ok());
  EXPECT_EQ(server_.inference.last_mlp.packed().up().experts(0).format(), "plain");
  EXPECT_EQ(server_.inference.last_mlp.expert_ids().raw(), ids.bytes);
  EXPECT_FALSE(server_.inference.last_mlp.has_router_weights());
  EXPECT_FALSE(server_.inference.last_mlp.has_activation_parameters());

  const client::Router logits = {.logits = router,
                                 .top_k = 2,
                                 .scoring = v1::SIGMOID,
                                 .correction_bias = router,
                                 .n_group = 4,
                                 .topk_group = 3,
                                 .norm_topk_prob = true,
                                 .routed_scaling_factor = 2.5f};
  v1::ActivationParameters parameters;
  parameters.set_limit(7);
  ref.set_shared_expert("shared");
  ASSERT_TRUE(client_
                  ->GatedMlp({.mlp = ref,
                              .activations = Call().activations,
                              .router = logits,
                              .gate_bias = router,
                              .up_bias = ids,
                              .down_bias = router,
                              .shared_expert_gate = router,
                              .activation_function = v1::SWIGLU_OAI,
                              .activation_parameters = parameters})
                  .ok());
  const v1::GatedMlpRequest& mlp = server_.inference.last_mlp;
  EXPECT_EQ(mlp.mlp().shared_expert(), "shared");
  EXPECT_EQ(mlp.router().logits().raw(), router.bytes);
  EXPECT_EQ(mlp.router().top_k(), 2);
  EXPECT_EQ(mlp.router().scoring(), v1::SIGMOID);
  EXPECT_EQ(mlp.router().correction_bias().raw(), router.bytes);
  EXPECT_EQ(mlp.router().n_group(), 4);
  EXPECT_EQ(mlp.router().topk_group(), 3);
  EXPECT_TRUE(mlp.router().norm_topk_prob());
  EXPECT_EQ(mlp.router().routed_scaling_factor(), 2.5f);
  EXPECT_FALSE(mlp.has_expert_ids());
  EXPECT_EQ(mlp.gate_bias().raw(), router.bytes);
  EXPECT_EQ(mlp.up_bias().raw(), ids.bytes);
  EXPECT_EQ(mlp.down_bias().raw(), router.bytes);
  EXPECT_EQ(mlp.shared_expert_gate().raw(), router.bytes);
  EXPECT_EQ(mlp.activation_parameters().limit(), 7);
}

TEST_F(ClientTest, SendsEveryFieldOfKv) {
  const Tensor block = *Tensor::FromFloats(v1::BF16, {1, 1, 2}, {1.0f, 2.0f});
  const Tensor scales = *Tensor::FromFloats(v1::FP16, {1}, {0.5f});
  const auto computed = client_->QuantizeKv({.block = block, .scale_dtype = v1::FP32});
  ASSERT_TRUE(computed.ok()) << computed.status();
  EXPECT_EQ(computed->codes.dtype, v1::UINT8);
  EXPECT_TRUE(computed->scales.has_value() && computed->zeros.has_value());
  EXPECT_EQ(server_.inference.last_quantize_kv.block().raw(), block.bytes);
  EXPECT_EQ(server_.inference.last_quantize_kv.scale_dtype(), v1::FP32);
  EXPECT_FALSE(server_.inference.last_quantize_kv.has_scales());
  const auto given = client_->QuantizeKv(
      {.block = block, .scales = scales, .zeros = scales, .priority = 4, .request_id = "kv"});
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_FALSE(given->scales.has_value());
  EXPECT_EQ(server_.inference.last_quantize_kv.zeros().raw(), scales.bytes);
  EXPECT_EQ(server_.inference.last_quantize_kv.priority(), 4);
  EXPECT_EQ(server_.inference.last_quantize_kv.request_id(), "kv");
  const auto back = client_->DequantizeKv({.codes = computed->codes,
                                           .scales = scales,
                                           .zeros = scales,
                                           .head_dim = 3,
                                           .output_dtype = v1::FP16,
                                           .form = v1::FMA});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(server_.inference.last_dequantize_kv.head_dim(), 3);
  EXPECT_EQ(server_.inference.last_dequantize_kv.form(), v1::FMA);
}

TEST_F(ClientTest, CallsNameTheirWeightForLoadBalancers) {
  MatmulCall call = Call();
  EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
  call.weight = WeightName{"m", "\u00e4"};
  EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
  call.weight = WeightName{"m", std::string(600, 'w')};
  EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
  call.weight = v1::PackedWeight();
  EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
  GatedMlpCall mlp = {.activations = Call().activations};
  mlp.mlp = v1::GatedMlpRef();
  std::get<v1::GatedMlpRef>(mlp.mlp).set_model("m");
  std::get<v1::GatedMlpRef>(mlp.mlp).set_path("layers.0.mlp");
  EXPECT_TRUE(client_->GatedMlp(mlp).ok());
  EXPECT_FALSE(client_->Dequantize({.weight = WeightName{"m", "a.b"}}).ok()) << "no rows came";
  auto silent = *Client::Create({.address = server_.address, .weight_key = false});
  EXPECT_TRUE(silent->QuantizedMatmul(Call()).ok());
  EXPECT_THAT(server_.inference.weight_keys,
              ::testing::ElementsAre("m/w", "", "", "", "m/layers.0.mlp", "m/a.b", ""));
}

TEST_F(ClientTest, KeepsCodeMessageAndDetails) {
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("activations.shape");
  google::rpc::Status details;
  ASSERT_TRUE(details.add_details()->PackFrom(bad));
  server_.inference.status =
      grpc::Status(grpc::FAILED_PRECONDITION, "got a, expected b", details.SerializeAsString());
  const absl::Status status = client_->QuantizedMatmul(Call()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "got a, expected b");
  ASSERT_TRUE(status.GetPayload(kErrorDetailsPayload).has_value());
  google::rpc::Status received;
  ASSERT_TRUE(received.ParseFromString(std::string(*status.GetPayload(kErrorDetailsPayload))));
  EXPECT_EQ(received.details_size(), 1);
  EXPECT_TRUE(client_->connected());
}

TEST_F(ClientTest, DequantizesSmallBlocksAsOneMessage) {
  const auto result =
      client_->Dequantize({.weight = WeightName{"m", "w"}, .row_end = 1, .column_end = 1});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->output.bytes, std::string("\x00\x3c", 2));
  EXPECT_EQ(server_.inference.unary_calls, 1);
  EXPECT_EQ(server_.inference.stream_calls, 0);
}

TEST_F(ClientTest, DequantizesTheRestThroughTheStream) {
  server_.inference.AddChunk(7, 9, 3, 2, 'a');
  server_.inference.AddChunk(9, 10, 3, 2, 'b');
  const auto result = client_->Dequantize({.weight = WeightName{"m", "w"}, .row_begin = 7});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->output.shape, ::testing::ElementsAre(3, 2));
  EXPECT_EQ(result->output.bytes, "aaaaaaaabbbb");
  EXPECT_EQ(result->execution.kernel(), "fake/dequantize");
  EXPECT_EQ(server_.inference.last_dequantize.rows().begin(), 7);
  EXPECT_FALSE(server_.inference.last_dequantize.has_columns());
  EXPECT_EQ(server_.inference.unary_calls, 0);
}

TEST_F(ClientTest, RefusesChunksOutOfOrderOrMissing) {
  const DequantizeCall call = {.weight = WeightName{"m", "w"}};
  const auto code = [&] { return client_->Dequantize(call).status().code(); };
  EXPECT_EQ(code(), absl::StatusCode::kInternal) << "no chunk at all";
  server_.inference.AddChunk(0, 1, 3, 2);
  EXPECT_EQ(code(), absl::StatusCode::kInternal) << "two rows missing";
  server_.inference.AddChunk(2, 3, 3, 2);
  EXPECT_EQ(code(), absl::StatusCode::kInternal) << "a hole";
  server_.inference.chunks.pop_back();
  server_.inference.AddChunk(1, 3, 3, 2);
  EXPECT_EQ(code(), absl::StatusCode::kOk);
  server_.inference.AddChunk(3, 4, 3, 2);
  EXPECT_EQ(code(), absl::StatusCode::kInternal) << "a row too many";
  server_.inference.chunks.pop_back();
  server_.inference.chunks.back().mutable_output()->mutable_raw()->pop_back();
  EXPECT_EQ(code(), absl::StatusCode::kInternal) << "a byte too few";
}

TEST_F(ClientTest, SinkEndsTheCall) {
  for (int row = 0; row < 1000; ++row) server_.inference.AddChunk(row, row + 1, 1000, 64);
  int blocks = 0;
  const auto execution = client_->DequantizeBlocks(
      {.weight = WeightName{"m", "w"}}, [&blocks](const DequantizeBlock& block) {
        EXPECT_EQ(block.first_row, blocks);
        return ++blocks == 3 ? absl::ResourceExhaustedError("disk full") : absl::OkStatus();
      });
  EXPECT_EQ(execution.status().message(), "disk full");
  EXPECT_EQ(blocks, 3);
}

TEST_F(ClientTest, StreamsAnswersAndTheirErrors) {
  const auto stream = client_->QuantizedMatmulStream();
  for (const char* id : {"a", "bad", "c"}) {
    MatmulCall call = Call();
    call.request_id = id;
    ASSERT_TRUE(stream->Send(std::move(call)).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  std::vector<std::string> ids;
  while (true) {
    const auto answer = stream->Receive();
    ASSERT_TRUE(answer.ok()) << answer.status();
    if (!answer->has_value()) break;
    ids.push_back((*answer)->request_id);
    const absl::Status status = (*answer)->result.status();
    EXPECT_EQ(status.ok(), ids.back() != "bad");
    if (status.ok()) continue;
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_EQ(status.message(), "activations: bad");
    google::rpc::Status details;
    ASSERT_TRUE(
        details.ParseFromString(std::string(status.GetPayload(kErrorDetailsPayload).value())));
    EXPECT_EQ(details.code(), grpc::INVALID_ARGUMENT);
    EXPECT_EQ(details.message(), "activations: bad");
    EXPECT_EQ(details.details(0).value(), "detail");
  }
  EXPECT_THAT(ids, ::testing::UnorderedElementsAre("a", "bad", "c"));
  EXPECT_FALSE((*stream->Receive()).has_value()) << "the end stays the end";
}

TEST_F(ClientTest, StreamSaysWhyItBroke) {
  server_.inference.status = grpc::Status(grpc::UNAVAILABLE, "draining");
  const auto stream = client_->QuantizedMatmulStream();
  ASSERT_TRUE(stream->CloseSend().ok());
  EXPECT_EQ(stream->Receive().status(), absl::UnavailableError("draining"));
}

TEST_F(ClientTest, DroppedStreamDoesNotHang) {
  auto stream = client_->QuantizedMatmulStream();
  ASSERT_TRUE(stream->Send(Call()).ok());
  stream.reset();
  EXPECT_TRUE(client_->QuantizedMatmul(Call()).ok());
}

TEST_F(ClientTest, DeadlineOfTheCallAndOfTheClient) {
  // A socket that accepts and never answers.
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t length = sizeof(address);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string target = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  const auto silent = *Client::Create({.address = target, .timeout = absl::Milliseconds(200)});
  const absl::Time start = absl::Now();
  EXPECT_EQ(silent->ListModels().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(silent->GetServerInfo({.timeout = absl::Milliseconds(100)}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_FALSE(silent->connected());
  close(fd);
}

TEST_F(ClientTest, GetModelFollowsThePages) {
  server_.repository.paged = true;
  for (const char* path : {"x", "y"}) server_.repository.more.add_weights()->set_path(path);
  for (const int reloads : {0, 2}) {
    server_.repository.reloads = reloads;
    const auto model = client_->GetModel("m");
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_EQ(model->weights_size(), 3);
    EXPECT_EQ(model->weights(2).path(), "y");
    EXPECT_EQ(model->next_page_token(), "");
  }
  server_.repository.reloads = 1 << 30;
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      client_->GetModel("m", {.timeout = absl::Milliseconds(200)}).status()));
}

TEST_F(ClientTest, AnAnswerOverItsOwnLimitIsToldAsTheClients) {
  const auto client = *Client::Create({.address = server_.address, .max_receive_bytes = 1000});
  const auto y = client->QuantizedMatmul(
      {.weight = WeightName{"m", "w"}, .activations = {v1::FP16, {1000}, std::string(2000, 'x')}});
  EXPECT_TRUE(absl::IsResourceExhausted(y.status())) << y.status();
  EXPECT_THAT(std::string(y.status().message()),
              ::testing::MatchesRegex("answer: got 2[0-9]+ bytes, expected at most 1000, the "
                                      "client's own max_receive_bytes"));
}

TEST_F(ClientTest, ModelsInfoAndHealth) {
  EXPECT_EQ(client_->ListModels()->models_size(), 1);
  EXPECT_EQ(client_->GetModel("m")->weights(0).k(), 4);
  EXPECT_EQ(client_->GetModel("x").status(), absl::NotFoundError("model 'x' is not loaded"));
  EXPECT_EQ(client_->LoadModel("m")->model().name(), "m");
  EXPECT_FALSE(server_.repository.require_all_weights);
  EXPECT_TRUE(client_->LoadModel("m", {}, /*require_all_weights=*/true).ok());
  EXPECT_TRUE(server_.repository.require_all_weights);
  EXPECT_TRUE(client_->UnloadModel("m").ok());
  EXPECT_EQ(client_->GetServerInfo()->version(), "9.9.9");
  server_.health.not_serving_first = 1;
  EXPECT_FALSE(*client_->IsServing(""));
  EXPECT_TRUE(*client_->IsServing(""));
  EXPECT_EQ(client_->IsServing("unknown").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, ARegionLastsAsLongAsItsObject) {
  v1::ShareMemoryRequest request;
  request.set_region("r");
  auto region = client_->ShareMemory(request);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_TRUE((*region)->alive());
  EXPECT_EQ(server_.inference.regions, 1);
  region->reset();
  EXPECT_TRUE(Eventually([&] { return server_.inference.regions == 0; }));

  region = client_->ShareMemory(request, {.timeout = absl::InfiniteDuration()});
  ASSERT_TRUE(region.ok()) << region.status();
  server_.inference.end_regions = true;
  EXPECT_TRUE(Eventually([&] { return !(*region)->alive(); }));
}

TEST_F(ClientTest, ARegionThatIsRefusedOrLateIsAnError) {
  v1::ShareMemoryRequest request;
  EXPECT_EQ(client_->ShareMemory(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.set_region("slow");
  const absl::Status late =
      client_->ShareMemory(request, {.timeout = absl::Milliseconds(50)}).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] { return server_.inference.regions == 0; }));
}

}  // namespace
}  // namespace awqd::client
