// The decoder of the Open Inference Protocol: every rule of inputs, parameters and outputs, in
// pieces as gRPC delivers them.
#include <cstring>
#include <functional>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/oip/infer_wire.h"
#include "server/wire/oip/tensors.h"
#include "server/wire/status.h"
#include "tests/server/wire/wire_check.h"
#include "tests/testing/repeated.h"

namespace awqd::wire::oip {
namespace {

using inference::ModelInferRequest;
using ::testing::HasSubstr;

ModelInferRequest::InferInputTensor* AddInput(ModelInferRequest* request, const std::string& name,
                                              const std::string& datatype,
                                              std::initializer_list<int64_t> shape) {
  auto* input = request->add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  for (const int64_t dim : shape) input->add_shape(dim);
  return input;
}

ModelInferRequest Good() {
  ModelInferRequest request;
  request.set_model_name("m/a.b");
  AddInput(&request, "x", "BF16", {2, 4});
  request.add_raw_input_contents("0123456789abcdef");
  return request;
}

// The request that a message became, and the range of its payload.
template <typename Request>
struct Decoded {
  absl::Status status;
  ParsedRequest<Request> message;
  Echo echo;
  std::string payload;  // of the activations, in whichever field
};

template <typename Request>
absl::Status ScanAndDecode(Pieces pieces, ParsedRequest<Request>* out, Echo* echo) {
  return Decode(pieces, ScanFields(pieces, *ModelInferRequest::descriptor(), kRawInputs), out,
                echo);
}

template <typename Request = v1::QuantizedMatmulRequest>
Decoded<Request> DecodeOf(const ModelInferRequest& from, uint32_t seed = 3) {
  const std::string bytes = from.SerializeAsString();
  const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
  Decoded<Request> out;
  out.status = ScanAndDecode(pieces, &out.message, &out.echo);
  if (out.message.cut) {
    out.payload.resize(out.message.cut->size);
    CopyRange(pieces, *out.message.cut, out.payload.data());
  }
  return out;
}

void ExpectError(const ModelInferRequest& request, const std::string& field,
                 const std::string& message) {
  const auto decoded = DecodeOf(request);
  EXPECT_EQ(decoded.status.code(), absl::StatusCode::kInvalidArgument) << message;
  EXPECT_EQ(FieldOf(decoded.status), field);
  EXPECT_THAT(std::string(decoded.status.message()), HasSubstr(field + ": got " + message));
}

TEST(OipWire, ThePayloadStaysInItsPieces) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const auto decoded = DecodeOf(Good(), seed);
    ASSERT_TRUE(decoded.status.ok()) << decoded.status;
    EXPECT_EQ(decoded.payload, "0123456789abcdef");
    const v1::QuantizedMatmulRequest& request = decoded.message.request;
    EXPECT_EQ(request.weight().model(), "m");
    EXPECT_EQ(request.weight().weight(), "a.b");
    EXPECT_EQ(request.activations().dtype(), v1::BF16);
    EXPECT_EQ(request.activations().shape_size(), 2);
    EXPECT_TRUE(request.activations().has_raw());
    EXPECT_FALSE(request.has_bias());
    EXPECT_EQ(request.output_encoding(), v1::RAW);
  }
}

TEST(OipWire, TheFieldScanDoesNotCountThePayload) {
  ModelInferRequest request = Good();
  request.set_raw_input_contents(0, std::string(1 << 20, 'x'));
  const std::string bytes = request.SerializeAsString();
  const absl::string_view piece = bytes;
  EXPECT_LT(ScanFields({&piece, 1}, *ModelInferRequest::descriptor(), kRawInputs).parsed_bytes,
            1000);
  EXPECT_GE(ScanFields({&piece, 1}, *ModelInferRequest::descriptor()).parsed_bytes, 1 << 20);
}

TEST(OipWire, TypedContentsMayBeAsManyAsAPayload) {
  ModelInferRequest request = Good();
  request.clear_raw_input_contents();
  request.mutable_inputs(0)->set_datatype("INT8");
  Repeat(100000, int32_t{1}, request.mutable_inputs(0)->mutable_contents()->mutable_int_contents());
  const std::string bytes = request.SerializeAsString();
  const absl::string_view piece = bytes;
  const FieldScan scan = ScanFields({&piece, 1}, *ModelInferRequest::descriptor(), kRawInputs);
  EXPECT_TRUE(scan.passes);
  EXPECT_GE(scan.parsed_bytes, 100000 * 4);
}

TEST(OipWire, OtherInputsAreCopiedInTheirOrder) {
  ModelInferRequest request = Good();
  request.set_model_name("m/e.*.up");
  AddInput(&request, "router_weights", "FP32", {2, 1});
  AddInput(&request, "ids", "INT32", {2, 1});
  request.add_raw_input_contents("wwwwWWWW");
  request.add_raw_input_contents("iiiiIIII");
  const auto decoded = DecodeOf<v1::GroupedQuantizedMatmulRequest>(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  EXPECT_EQ(decoded.payload, "0123456789abcdef");
  EXPECT_EQ(decoded.message.request.router_weights().raw(), "wwwwWWWW");
  EXPECT_EQ(decoded.message.request.expert_ids().raw(), "iiiiIIII");
  EXPECT_EQ(decoded.message.copied_bytes, 16);
}

TEST(OipWire, E4m3OfExpertsComesWithItsScales) {
  ModelInferRequest request = Good();
  request.set_model_name("m/e.*.up");
  request.mutable_inputs(0)->set_datatype("FP8_E4M3");
  AddInput(&request, "ids", "INT32", {2, 1});
  AddInput(&request, "activation_scales", "FP32", {2});
  request.add_raw_input_contents("iiiiIIII");
  request.add_raw_input_contents("ssssSSSS");
  const auto decoded = DecodeOf<v1::GroupedQuantizedMatmulRequest>(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  EXPECT_EQ(decoded.payload, "0123456789abcdef");
  EXPECT_EQ(decoded.message.request.activations().dtype(), v1::FP8_E4M3);
  EXPECT_EQ(decoded.message.request.activation_scales().raw(), "ssssSSSS");
}

TEST(OipWire, AnInputInSharedMemoryTakesNoRawEntry) {
  ModelInferRequest request = Good();
  AddInput(&request, "bias", "FP32", {2});
  request.mutable_inputs()->SwapElements(0, 1);
  auto* x = request.mutable_inputs(1);
  ASSERT_EQ(x->name(), "x");
  (*x->mutable_parameters())["shared_memory_region"].set_string_param("r");
  (*x->mutable_parameters())["shared_memory_byte_size"].set_int64_param(16);
  (*x->mutable_parameters())["shared_memory_offset"].set_int64_param(64);
  request.set_raw_input_contents(0, "biasbias");
  const auto decoded = DecodeOf(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  EXPECT_EQ(decoded.message.request.bias().raw(), "biasbias");
  EXPECT_FALSE(decoded.message.cut.has_value());
  const v1::SharedMemory& shared = decoded.message.request.activations().shared_memory();
  EXPECT_EQ(shared.region(), "r");
  EXPECT_EQ(shared.offset(), 64);
  EXPECT_EQ(shared.size(), 16);
}

TEST(OipWire, InputsAreThoseOfTheModel) {
  ModelInferRequest request = Good();
  request.mutable_inputs(0)->set_name("X");
  ExpectError(request, "inputs[0].name",
              "\"X\", expected \"x\" or \"bias\" or \"activation_scales\"");
  request = Good();
  *request.add_inputs() = request.inputs(0);
  ExpectError(request, "inputs[1].name", "\"x\" again, expected each input once");
  request = Good();
  request.mutable_inputs(0)->set_datatype("FP64");
  ExpectError(request, "inputs[x].datatype", "\"FP64\", expected FP16, BF16");
}

TEST(OipWire, ContentsAreRawOrTyped) {
  ModelInferRequest request = Good();
  request.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1);
  ExpectError(request, "inputs[x].contents", "contents, expected none beside raw_input_contents");
  request.clear_raw_input_contents();
  ExpectError(request, "inputs[x].contents",
              "fp32_contents for BF16, expected raw_input_contents: no contents are of BF16");
  request.mutable_inputs(0)->set_datatype("INT8");
  ExpectError(request, "inputs[x].contents",
              "fp32_contents for INT8, expected int_contents, or raw_input_contents");
  request = Good();
  request.clear_raw_input_contents();
  ExpectError(request, "inputs[x].contents", "nothing, expected an entry of raw_input_contents");
  request = Good();
  request.add_raw_input_contents("more");
  ExpectError(request, "raw_input_contents",
              "2, expected 1, one for each input outside shared memory");
  request = Good();
  AddInput(&request, "bias", "FP32", {4});
  ExpectError(request, "raw_input_contents", "1, expected one for each input");
}

TEST(OipWire, AnEmptyTensorNeedsNoContents) {
  ModelInferRequest request = Good();
  request.clear_raw_input_contents();
  request.mutable_inputs(0)->set_shape(0, 0);
  const auto decoded = DecodeOf(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  EXPECT_TRUE(decoded.message.request.activations().has_raw());
}

TEST(OipWire, ParametersAreKnownAndInRange) {
  const auto with = [](const char* name,
                       const std::function<void(inference::InferParameter*)>& set) {
    ModelInferRequest request = Good();
    set(&(*request.mutable_parameters())[name]);
    return request;
  };
  ExpectError(with("sequence_id", [](auto* p) { p->set_int64_param(1); }),
              "parameters[sequence_id]",
              "1, expected none: the parameters here are priority, timeout");
  ExpectError(with("priority", [](auto* p) { p->set_int64_param(-1); }), "parameters[priority]",
              "-1, expected an integer from 0 to 9");
  ExpectError(with("timeout", [](auto* p) { p->set_uint64_param(~uint64_t{0}); }),
              "parameters[timeout]", "18446744073709551615, expected an integer of at least 0");
  ExpectError(with("path", [](auto* p) { p->set_string_param("fast"); }), "parameters[path]",
              "\"fast\", expected \"AUTO\", \"FUSED\" or \"DEQUANTIZE\"");
  ExpectError(with("execution", [](auto* p) { p->set_double_param(0.5); }), "parameters[execution]",
              "0.5, expected true or false");
  ExpectError(with("triton_enable_empty_final_response", [](auto* p) { p->set_int64_param(1); }),
              "parameters[triton_enable_empty_final_response]", "1, expected true or false");
  ExpectError(with("row_begin", [](auto* p) { p->set_int64_param(1); }), "parameters[row_begin]",
              "1, expected none");
  const auto good =
      DecodeOf(with("activation_function", [](auto* p) { p->set_string_param("SILU"); }));
  ASSERT_TRUE(good.status.ok());
  EXPECT_EQ(good.message.request.activation_function(), v1::SILU);
  ModelInferRequest mlp = with("activation_function", [](auto* p) { p->set_string_param("SITU"); });
  mlp.set_model_name("m/mlp:gated_mlp");
  (*mlp.mutable_parameters())["activation_beta"].set_double_param(1.5);
  (*mlp.mutable_parameters())["activation_linear_beta"].set_int64_param(2);
  const auto parameters =
      DecodeOf<v1::GatedMlpRequest>(mlp).message.request.activation_parameters();
  EXPECT_EQ(parameters.beta(), 1.5f);
  EXPECT_EQ(parameters.linear_beta(), 2.0f);
  EXPECT_FALSE(parameters.has_limit());
  EXPECT_EQ(
      DecodeOf(with("priority", [](auto* p) { p->set_int64_param(9); })).message.request.priority(),
      -4);
  EXPECT_EQ(DecodeOf(with("timeout", [](auto* p) { p->set_int64_param(0); })).message.timeout,
            absl::InfiniteDuration());
}

TEST(OipWire, ARouterAndASharedExpert) {
  ModelInferRequest request = Good();
  request.set_model_name("m/mlp:gated_mlp");
  AddInput(&request, "router_logits", "FP32", {2, 1});
  AddInput(&request, "up_bias", "FP32", {1});
  AddInput(&request, "shared_expert_gate", "FP32", {1});
  request.add_raw_input_contents("llllLLLL");
  request.add_raw_input_contents("uuuu");
  request.add_raw_input_contents("gggg");
  auto& parameters = *request.mutable_parameters();
  parameters["top_k"].set_int64_param(3);
  parameters["scoring"].set_string_param("SIGMOID");
  parameters["n_group"].set_int64_param(4);
  parameters["topk_group"].set_uint64_param(2);
  parameters["norm_topk_prob"].set_bool_param(true);
  parameters["routed_scaling_factor"].set_double_param(2.5);
  parameters["shared_expert"].set_string_param("mlp.shared_experts");
  const auto decoded = DecodeOf<v1::GatedMlpRequest>(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  const v1::GatedMlpRequest& got = decoded.message.request;
  EXPECT_EQ(got.router().logits().raw(), "llllLLLL");
  EXPECT_EQ(got.router().top_k(), 3);
  EXPECT_EQ(got.router().scoring(), v1::SIGMOID);
  EXPECT_EQ(got.router().n_group(), 4);
  EXPECT_EQ(got.router().topk_group(), 2);
  EXPECT_TRUE(got.router().norm_topk_prob());
  EXPECT_EQ(got.router().routed_scaling_factor(), 2.5f);
  EXPECT_EQ(got.up_bias().raw(), "uuuu");
  EXPECT_EQ(got.shared_expert_gate().raw(), "gggg");
  EXPECT_EQ(got.mlp().shared_expert(), "mlp.shared_experts");
  EXPECT_EQ(EncodeError(FieldError("router.top_k", "0", "1 to 4")).message(),
            "parameters[top_k]: got 0, expected 1 to 4");
  EXPECT_EQ(EncodeError(FieldError("router.logits.shape", "[1]", "[2]")).message(),
            "inputs[router_logits].shape: got [1], expected [2]");
  request = Good();
  request.set_model_name("m/mlp:gated_mlp");
  EXPECT_FALSE(DecodeOf<v1::GatedMlpRequest>(request).message.request.has_router());
  (*request.mutable_parameters())["scoring"].set_string_param("HASH");
  EXPECT_FALSE(DecodeOf<v1::GatedMlpRequest>(request).status.ok());
}

TEST(OipWire, OneOutputOrNone) {
  ModelInferRequest request = Good();
  request.add_outputs()->set_name("y");
  EXPECT_TRUE(DecodeOf(request).status.ok());
  request.add_outputs()->set_name("y");
  ExpectError(request, "outputs", "2, expected none or one, \"y\"");
  request.mutable_outputs()->RemoveLast();
  auto& parameters = *request.mutable_outputs(0)->mutable_parameters();
  parameters["shared_memory_region"].set_string_param("r");
  ExpectError(request, "outputs[0].parameters[shared_memory_byte_size]", "nothing, expected");
  parameters["shared_memory_byte_size"].set_int64_param(32);
  const auto decoded = DecodeOf(request);
  ASSERT_TRUE(decoded.status.ok()) << decoded.status;
  EXPECT_EQ(decoded.message.request.output_shared_memory().region(), "r");
  EXPECT_EQ(decoded.echo.output.size(), 32);
  parameters["binary_data"].set_bool_param(true);
  EXPECT_TRUE(DecodeOf(request).status.ok()) << "over HTTP it would mean something";
  parameters["classification"].set_int64_param(3);
  ExpectError(request, "outputs[0].parameters[classification]", "3, expected none");
}

// A request of every kind, in any pieces and with any wrong byte: the same status and the same
// result as in one piece, and a payload within the message.
TEST(OipWire, WrongBytesAreReadTheSameInAnyPieces) {
  ModelInferRequest good = Good();
  (*good.mutable_parameters())["timeout"].set_int64_param(7);
  (*good.mutable_inputs(0)->mutable_parameters())["binary_data_size"].set_int64_param(16);
  good.add_outputs()->set_name("y");
  AddInput(&good, "bias", "FP32", {1});
  good.add_raw_input_contents("bias");
  const std::string bytes = good.SerializeAsString();
  std::mt19937 random(11);
  int decoded = 0, refused = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    std::string spoilt = bytes;
    for (uint32_t edits = random() % 3; edits > 0; --edits) {
      spoilt[random() % spoilt.size()] = static_cast<char>(random());
    }
    if (i % 7 == 0) spoilt.resize(random() % spoilt.size());
    const absl::string_view whole = spoilt;
    const std::vector<absl::string_view> pieces = InPieces(spoilt, i);
    const bool passes = ScanFields(pieces, *ModelInferRequest::descriptor(), kRawInputs).passes;
    ASSERT_EQ(ScanFields({&whole, 1}, *ModelInferRequest::descriptor(), kRawInputs).passes, passes);
    if (!passes) continue;
    ParsedRequest<v1::QuantizedMatmulRequest> one, other;
    Echo echo_of_one, echo_of_other;
    const absl::Status status = ScanAndDecode({&whole, 1}, &one, &echo_of_one);
    ASSERT_EQ(ScanAndDecode(pieces, &other, &echo_of_other), status)
        << ::testing::PrintToString(spoilt);
    if (!status.ok()) {
      ++refused;
      continue;
    }
    ++decoded;
    ASSERT_EQ(SortedBytes(one.request), SortedBytes(other.request));
    ASSERT_EQ(one.cut.has_value(), other.cut.has_value());
    if (!one.cut) continue;
    ASSERT_EQ(one.cut->begin, other.cut->begin);
    ASSERT_GE(one.cut->begin, 0);
    ASSERT_LE(one.cut->begin + one.cut->size, static_cast<int64_t>(spoilt.size()));
  }
  EXPECT_GT(decoded, 5000);
  EXPECT_GT(refused, 1000);
}

TEST(OipWire, NamesSayWhatIsDone) {
  const std::pair<const char*, Kind> names[] = {
      {"m/a.b", Kind::kProduct},       {"m/a.b:dequantize", Kind::kDequantize},
      {"m/a.*.b", Kind::kStack},       {"m/a.*.b:dequantize", Kind::kDequantize},
      {"m/mlp:gated_mlp", Kind::kMlp}, {"m/experts.*:gated_mlp", Kind::kMlp}};
  for (const auto& [name, kind] : names) {
    const ModelName split = SplitName(name);
    EXPECT_EQ(split.kind, kind) << name;
    EXPECT_EQ(JoinName(split.model, split.path, split.kind), name);
  }
  EXPECT_EQ(SplitName("m/a/b").path, "a/b");
  EXPECT_EQ(SplitName("m").path, "");
}

TEST(OipWire, OnlyFieldsOfOursAreRenamed) {
  const auto encoded = [](absl::string_view field) {
    const absl::Status status = EncodeError(FieldError(field, "a", "b"));
    EXPECT_EQ(std::string(status.message()), FieldOf(status) + ": got a, expected b");
    return FieldOf(status);
  };
  EXPECT_EQ(encoded("activations.floats.values[3]"), "inputs[x].contents.fp32_contents[3]");
  EXPECT_EQ(encoded("activations.raw"), "raw_input_contents[x]");
  EXPECT_EQ(encoded("expert_ids"), "inputs[ids]");
  EXPECT_EQ(encoded("activation_scales.shape"), "inputs[activation_scales].shape");
  EXPECT_EQ(encoded("weight.weight"), "model_name");
  EXPECT_EQ(encoded("activation_quantization"), "parameters[activation_quantization]");
  EXPECT_EQ(encoded("output_shared_memory.size"), "outputs[0].parameters[shared_memory_byte_size]");
  EXPECT_EQ(encoded("activationsx"), "activationsx");
  EXPECT_TRUE(EncodeError(absl::OkStatus()).ok());
}

TEST(OipWire, WhatIsNoMessageIsNone) {
  const absl::string_view piece = "\x0a\x05m";
  ParsedRequest<v1::QuantizedMatmulRequest> message;
  Echo echo;
  EXPECT_THAT(std::string(ScanAndDecode({&piece, 1}, &message, &echo).message()),
              HasSubstr("3 bytes that do not parse, expected a serialized "
                        "inference.ModelInferRequest"));
}

}  // namespace
}  // namespace awqd::wire::oip
