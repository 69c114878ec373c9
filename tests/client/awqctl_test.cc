// awqctl from arguments to exit code, against services that live in the test.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/awqctl_command.h"
#include "tests/client/fake_server.h"

namespace awqd::awqctl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class AwqctlTest : public AwqctlFixture {
 protected:
  // Runs against the fake server.
  int Run(std::vector<std::string> args) {
    args.insert(args.begin(), {"--address", server_.address});
    return RunAlone(args);
  }
  size_t Files() const {
    return std::distance(fs::directory_iterator(directory_.path()), fs::directory_iterator());
  }

  FakeServer server_;
};

TEST_F(AwqctlTest, HelpTeaches) {
  EXPECT_EQ(RunAlone({"--help"}), kOk);
  EXPECT_THAT(out_, HasSubstr("Exit codes:"));
  EXPECT_THAT(out_, HasSubstr("awqctl matmul my-model"));
  EXPECT_THAT(out_, HasSubstr("AWQCTL_ADDRESS"));
  for (const char* command : {"status", "models", "load", "unload", "kernels", "dequantize",
                              "matmul", "compare", "healthcheck", "bench"}) {
    EXPECT_EQ(RunAlone({command, "--help"}), kOk) << command;
    EXPECT_THAT(out_, HasSubstr(command));
    EXPECT_THAT(err_, IsEmpty());
  }
}

TEST_F(AwqctlTest, BadArgumentsExitOneWithOneLine) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"bogus"},
      {"status", "--bogus"},
      {"load"},
      {"matmul", "m", "w"},
      {"matmul", "m", "w", "--random", "-1"},
      {"matmul", "m", "w", "x.npy", "--random", "1"},
      {"matmul", "m", "w", "--random", "1", "--path", "slow"},
      {"matmul", "m", "w", "--random", "1", "--dtype", "int8"},
      {"matmul", "m", "w", "--random", "16777216", "--timeout", "-1"},
      {"matmul", "m", "w", "--random", "1", "-o", "y.safetensors"},
      {"dequantize", "m", "w"},
      {"dequantize", "m", "w", "-o", "w.txt"},
      {"dequantize", "m", "w", "-o", "w.npy", "--dtype", "bf16"},
      {"dequantize", "m", "w", "-o", "w.npy", "--rows", "3"},
      {"dequantize", "m", "w", "-o", "w.npy", "--rows", "3:3"},
      {"dequantize", "m", "w", "-o", "w.npy", "--columns", "-1:3"},
      {"compare", "a", "b"},
      {"compare", "a", "b", "--bit_exact", "--max_relative_error", "1"},
      {"--address", "nowhere", "status"}};
  for (const auto& args : cases) {
    EXPECT_EQ(RunAlone(args), kBadArguments) << ::testing::PrintToString(args);
    EXPECT_EQ(std::count(err_.begin(), err_.end(), '\n'), 1) << err_;
    EXPECT_THAT(out_, IsEmpty());
  }
  EXPECT_EQ(RunAlone({"dequantize", "m", "w", "-o", "w.npy", "--dtype", "bf16"}), kBadArguments);
  EXPECT_THAT(err_, HasSubstr(".safetensors"));
}

TEST_F(AwqctlTest, TellsAnUnreachableServerFromAFailedCall) {
  EXPECT_EQ(RunAlone({"--address", "127.0.0.1:1", "status"}), kCannotConnect);
  EXPECT_THAT(err_, HasSubstr("cannot reach 127.0.0.1:1"));
  server_.repository.status = grpc::Status(grpc::UNAVAILABLE, "draining");
  EXPECT_EQ(Run({"models"}), kCallFailed);
  EXPECT_EQ(err_, "awqctl: UNAVAILABLE: draining\n");
  EXPECT_THAT(out_, IsEmpty());
}

TEST_F(AwqctlTest, OutputThatCannotBeWrittenIsAnError) {
  for (const std::vector<std::string>& args : {std::vector<std::string>{"--help"},
                                               {"help", "bench"},
                                               {"--version"},
                                               {"--address", server_.address, "status"}}) {
    std::ostringstream out, err;
    out.setstate(std::ios::badbit);  // as after a write to a full disk
    Console console{.out = out, .err = err};
    EXPECT_EQ(RunAwqctl(args, console), kFileFailed) << ::testing::PrintToString(args);
    EXPECT_EQ(err.str(), "awqctl: cannot write to standard output\n");
  }
}

TEST_F(AwqctlTest, AddressComesFromTheEnvironment) {
  for (const char* name : {"AWQCTL_ADDRESS", "AWQD_ADDRESS"}) {
    ASSERT_EQ(setenv(name, server_.address.c_str(), 1), 0);
    EXPECT_EQ(RunAlone({"healthcheck"}), kOk);
    ASSERT_EQ(unsetenv(name), 0);
  }
}

TEST_F(AwqctlTest, StatusModelsLoadUnload) {
  EXPECT_EQ(Run({"status"}), kOk) << err_;
  EXPECT_THAT(out_, HasSubstr("awqd 9.9.9"));
  EXPECT_EQ(Run({"models"}), kOk);
  EXPECT_THAT(out_, HasSubstr("READY"));
  EXPECT_THAT(out_, HasSubstr("a\\x1b[31mb")) << "control characters must not reach the terminal";
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr("fused 0-255 fake/echo"));
  EXPECT_THAT(out_, HasSubstr("4 x 4, fake/echo: 1-128: 8x64\n"));
  server_.repository.share = 0.435f;
  EXPECT_EQ(Run({"models"}), kOk);
  EXPECT_THAT(out_, HasSubstr("LOADING 43 %"));
  server_.repository.share = 1;
  EXPECT_EQ(Run({"models", "x"}), kCallFailed);
  EXPECT_EQ(Run({"load", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr("loaded m"));
  EXPECT_FALSE(server_.repository.require_all_weights);
  EXPECT_EQ(Run({"load", "m", "--require_all_weights"}), kOk);
  EXPECT_TRUE(server_.repository.require_all_weights);
  EXPECT_EQ(Run({"unload", "m"}), kOk);
}

// Adds experts 0 .. `experts` - 1 of one stack to a model's answer.
void AddStack(const std::string& projection, int experts, v1::GetModelResponse* model) {
  v1::StackInfo& stack = *model->add_stacks();
  stack.set_path("l.experts.*." + projection);
  stack.set_experts(experts);
  stack.set_bytes(int64_t{experts} << 20);
  for (int i = 0; i < experts; ++i) {
    v1::WeightInfo& weight = *model->add_weights();
    weight.set_path("l.experts." + std::to_string(i) + "." + projection);
    weight.set_bytes(1 << 20);
    weight.set_layout("plain");
  }
}

TEST_F(AwqctlTest, AStackIsOneLineInsteadOfItsExperts) {
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, Not(HasSubstr("EXPERTS"))) << "without stacks there is no such column";
  EXPECT_THAT(out_, Not(HasSubstr("stacks")));
  v1::GetModelResponse& model = server_.repository.more;
  AddStack("up", 12, &model);
  AddStack("down", 2, &model);
  model.mutable_stacks(1)->set_refused("stack \"l.experts.*.down\": bad\x1b");
  model.add_weights()->set_path("l.experts.01.up");
  model.mutable_weights()->rbegin()->set_has_factor(true);
  model.add_weights()->set_path("l.experts.12.up");
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr(", 17 weights, 2 stacks, "));
  EXPECT_THAT(out_, ::testing::ContainsRegex("WEIGHT +EXPERTS +K "));
  EXPECT_THAT(out_, ::testing::ContainsRegex("\nw +- +4 +4 "));
  EXPECT_THAT(out_, ::testing::ContainsRegex("WITH +KERNELS"));
  EXPECT_THAT(out_, ::testing::ContainsRegex("\nl.experts.01.up .*0 B +factor"));
  EXPECT_THAT(out_, ::testing::ContainsRegex("\nl.experts.[*].up +12 .* plain +12.0 MiB"));
  for (int i = 0; i < 12; ++i) {
    EXPECT_THAT(out_, Not(HasSubstr("l.experts." + std::to_string(i) + ".up")));
  }
  // A weight that is not an expert of a usable stack keeps its line, or its number in one.
  for (const char* path : {"[0-1].down", "01.up", "12.up"}) {
    EXPECT_THAT(out_, HasSubstr(std::string("\nl.experts.") + path)) << path;
  }
  EXPECT_THAT(out_, HasSubstr("\nstacks that cannot be used:\n"
                              "stack \"l.experts.*.down\": bad\\x1b\n"));
  EXPECT_EQ(Run({"--json", "models", "m"}), kOk);
  const nlohmann::json json = nlohmann::json::parse(out_);
  EXPECT_EQ(json["weights"].size(), 17u);
  ASSERT_EQ(json["stacks"].size(), 2u);
  EXPECT_EQ(json["stacks"][0]["experts"], 12);
}

TEST_F(AwqctlTest, E4m3ActivationsThatACheckpointDeclaresAreTold) {
  v1::WeightInfo& weight = *server_.repository.more.add_weights();
  weight.set_activations(v1::FP8_PER_TOKEN);
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr("E4M3 activations are rounded, then as others (declared: fp8)"));
  weight.set_float8_kernel("fake/float8");
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr("E4M3 activations fake/float8 (declared: fp8)"));
}

TEST_F(AwqctlTest, EqualLayersAreOneLineAndSchemesAreExplained) {
  for (const int layer : {0, 1, 2, 4}) {
    for (const char* name : {"q_proj", "up_proj"}) {
      v1::WeightInfo& weight = *server_.repository.more.add_weights();
      weight.set_path(absl::StrCat("model.layers.", layer, ".", name));
      weight.set_scheme(layer == 4 ? "e2m1g16+e4m3*t" : "w4g128z");
      weight.add_plan()->set_kernel(std::string(name) == "q_proj" ? "some/kernel" : "fake/echo");
    }
  }
  server_.repository.more.add_weights()->set_scheme("of a newer server");
  EXPECT_EQ(Run({"models", "m"}), kOk);
  EXPECT_THAT(out_, HasSubstr("\nmodel.layers.[0-2].q_proj\n"));
  EXPECT_THAT(out_, HasSubstr("\nmodel.layers.[0-2].up_proj\n"));
  EXPECT_THAT(out_, HasSubstr("\nmodel.layers.4.q_proj\n"));
  EXPECT_THAT(out_, Not(HasSubstr("layers.1")));
  EXPECT_THAT(out_,
              HasSubstr("\nw4g128z: 4-bit codes, a scale (FP16) for each 128 rows of a column, "
                        "stored zero\n  points\n"));
  EXPECT_THAT(out_,
              HasSubstr("\ne2m1g16+e4m3*t: 4-bit floats (E2M1), a scale (E4M3) for each 16 rows "
                        "of a\n  column, a second scale for all\n"));
  EXPECT_THAT(out_, HasSubstr("kernels 2:\n  auto 0-0 some/kernel\n"));
}

TEST_F(AwqctlTest, EveryTableFitsEightyColumns) {
  v1::WeightInfo& weight = *server_.repository.more.add_weights();
  weight.set_path("model.language_model.layers.0.mlp.experts.up_projection");
  weight.set_scheme("w4b128x128r:bf16+bf16*c");
  weight.set_layout("some layout");
  weight.set_device("cuda:0");
  for (const char* command : {"status", "models m", "kernels", "top --interval 0.01 --screens 1"}) {
    EXPECT_EQ(Run(absl::StrSplit(command, ' ')), kOk) << err_;
    for (const absl::string_view line : absl::StrSplit(out_, '\n')) {
      EXPECT_LE(line.size(), 80u) << command << ": " << line;
    }
  }
}

TEST_F(AwqctlTest, JsonIsJson) {
  for (const std::vector<std::string>& args : {std::vector<std::string>{"status"},
                                               {"models"},
                                               {"models", "m"},
                                               {"load", "m"},
                                               {"unload", "m"},
                                               {"kernels"},
                                               {"healthcheck"},
                                               {"matmul", "m", "w", "--random", "2"}}) {
    std::vector<std::string> with_json = args;
    with_json.insert(with_json.begin(), "--json");
    EXPECT_EQ(Run(with_json), kOk) << err_;
    EXPECT_FALSE(nlohmann::json::parse(out_, nullptr, false).is_discarded()) << out_;
  }
}

TEST_F(AwqctlTest, KernelsAsMarkdown) {
  EXPECT_EQ(Run({"kernels", "--markdown"}), kOk);
  EXPECT_THAT(out_, HasSubstr("|---|"));
  EXPECT_THAT(out_, HasSubstr("no: no \\| GPU"));
  EXPECT_EQ(std::count(out_.begin(), out_.end(), '\n'), 3);
}

TEST_F(AwqctlTest, AKernelIsOneLineOfEightyColumns) {
  const auto add = [&](const std::string& name, const std::string& operation) -> v1::KernelInfo& {
    v1::KernelInfo& kernel = *server_.info.more.add_kernels();
    kernel.set_name(name);
    kernel.set_operation(operation);
    kernel.set_path(operation == "dequantize" ? "" : "fused");
    for (int bits = 1; bits <= 8; ++bits) kernel.add_bits(bits);
    kernel.set_max_tokens(-1);
    kernel.set_layout("k16");
    kernel.set_needs("cpu");
    kernel.set_available(true);
    for (const char* type : {"FP16", "BF16", "FP32"}) {
      kernel.add_activations(type);
      kernel.add_outputs(type);
    }
    return kernel;
  };
  add("cpu/plain_dequantize", "dequantize");
  add("cpu/dense", "matmul").set_path("dequantize");
  add("cpu/qmatmul_a8_scaled", "matmul_a8").add_activations("INT8");
  v1::KernelInfo& pairs = add("cpu/qmatmul_a16_pairs", "matmul");
  pairs.set_group_multiple(128);
  pairs.mutable_bits()->Clear();
  for (const int bits : {2, 4, 5, 8}) pairs.add_bits(bits);
  EXPECT_EQ(Run({"kernels"}), kOk);
  EXPECT_THAT(out_, HasSubstr("\ncpu/dense             matmul*    1-8     0-     floats"));
  EXPECT_THAT(out_, HasSubstr("\ncpu/qmatmul_a8_scaled matmul_a8  1-8     0-     floats, INT8"));
  EXPECT_THAT(out_, HasSubstr("2,4-5,8"));
  EXPECT_THAT(out_, HasSubstr("n x 128"));
  EXPECT_THAT(out_, HasSubstr("\nfake/echo: not here: no | GPU\n"));
  EXPECT_EQ(std::count(out_.begin(), out_.end(), '\n'), 1 + 5 + 3);
  // The longest names of kernels for GPUs leave room for fewer columns.
  add("sm80/qmatmul_a16_scaled_sums", "matmul_experts").set_max_tokens(2047);
  EXPECT_EQ(Run({"kernels"}), kOk);
  EXPECT_THAT(out_, HasSubstr("\nsm80/qmatmul_a16_scaled_sums matmul_experts"));
  EXPECT_THAT(out_, Not(HasSubstr("GROUPS")));
  for (const absl::string_view line : absl::StrSplit(out_, '\n')) EXPECT_LE(line.size(), 80u);
  EXPECT_EQ(Run({"kernels", "--wide"}), kOk);
  EXPECT_EQ(std::count(out_.begin(), out_.end(), '\n'), 1 + 6);
  EXPECT_THAT(out_, HasSubstr("FP16, BF16, FP32, INT8  FP16, BF16, FP32  k16"));
}

TEST_F(AwqctlTest, DequantizeWritesBlocks) {
  server_.inference.AddChunk(0, 2, 3, 2, 'a');
  server_.inference.AddChunk(2, 3, 3, 2, 'b');
  EXPECT_EQ(Run({"dequantize", "m", "w", "-o", Path("w.npy"), "--rows", ":3"}), kOk) << err_;
  EXPECT_THAT(err_, IsEmpty()) << "no progress bar without a terminal";
  EXPECT_THAT(out_, HasSubstr("[3, 2]"));
  EXPECT_EQ(client::ReadNpy(Path("w.npy"))->bytes, "aaaaaaaabbbb");
  EXPECT_EQ(server_.inference.last_dequantize.rows().end(), 3);
  terminal_ = true;
  EXPECT_EQ(Run({"dequantize", "m", "w", "-o", Path("w.safetensors")}), kOk);
  EXPECT_THAT(err_, HasSubstr("%"));
  EXPECT_EQ(Run({"dequantize", "m", "w", "-o", Path("w.safetensors"), "--quiet"}), kOk);
  EXPECT_THAT(err_, IsEmpty());
}

TEST_F(AwqctlTest, FailedDequantizeLeavesNothing) {
  server_.inference.AddChunk(0, 2, 3, 2);
  server_.inference.status = grpc::Status(grpc::INTERNAL, "device fault");
  EXPECT_EQ(Run({"dequantize", "m", "w", "-o", Path("w.npy")}), kCallFailed);
  EXPECT_THAT(err_, HasSubstr("device fault"));
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(Run({"dequantize", "m", "w", "-o", Path("no/w.npy")}), kFileFailed);
  EXPECT_THAT(err_, HasSubstr("no/w.npy"));
}

TEST_F(AwqctlTest, MatmulFromAFile) {
  const std::string x = Floats("x.npy", {1.0f, -2.0f});
  const std::string bias = Floats("b.npy", {5.0f});
  EXPECT_EQ(Run({"matmul", "m", "w", x, "-o", Path("y.npy"), "--dtype", "fp16", "--bias", bias,
                 "--path", "dequantize", "--activation_function", "gelu"}),
            kOk)
      << err_;
  EXPECT_THAT(out_, HasSubstr("path fused  kernel fake/echo"));
  EXPECT_THAT(out_, HasSubstr("latency"));
  EXPECT_EQ(server_.inference.last_matmul.activations().dtype(), v1::FP16);
  EXPECT_EQ(server_.inference.last_matmul.path(), v1::DEQUANTIZE);
  EXPECT_EQ(server_.inference.last_matmul.activation_function(), v1::GELU);
  EXPECT_EQ(server_.inference.last_matmul.bias().shape(0), 1);
  EXPECT_THAT(client::ReadNpy(Path("y.npy"))->ToDoubles(), ::testing::ElementsAre(1, -2));
}

TEST_F(AwqctlTest, MatmulOfQuantisedActivations) {
  const std::string x = Floats("x.npy", {1.0f, -2.0f});
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"matmul", "m", "w", x});
    EXPECT_EQ(Run(flags), kOk) << err_;
    return server_.inference.last_matmul;
  };
  v1::QuantizedMatmulRequest sent = run({"--quantize_activations", "per_token"});
  EXPECT_EQ(sent.activation_quantization(), v1::INT8_PER_TOKEN);
  EXPECT_FALSE(sent.has_activation_scales());
  sent = run({"--quantize_activations", "static", "--activation_scale", "0.5"});
  EXPECT_EQ(sent.activation_quantization(), v1::INT8_STATIC);
  EXPECT_EQ(sent.activation_scales().dtype(), v1::FP32);
  EXPECT_EQ(sent.activation_scales().raw(), std::string("\0\0\0\x3f", 4));
  sent = run({"--activation_scales", Floats("a.npy", {3.0f})});
  EXPECT_EQ(sent.activation_quantization(), v1::ACTIVATIONS_AS_SENT);
  EXPECT_EQ(sent.activation_scales().raw().size(), 4u);
}

TEST_F(AwqctlTest, MatmulWritesBf16AsFloat32) {
  const std::string x = Floats("x.npy", {1.0f, -2.0f});
  EXPECT_EQ(Run({"matmul", "m", "w", x, "-o", Path("y.npy"), "--dtype", "bf16"}), kOk) << err_;
  EXPECT_EQ(client::ReadNpy(Path("y.npy"))->type, client::NpyType::kF4);
  EXPECT_THAT(client::ReadNpy(Path("y.npy"))->ToDoubles(), ::testing::ElementsAre(1, -2));
}

TEST_F(AwqctlTest, MatmulAtRandomFollowsItsSeed) {
  const auto draw = [this](const std::string& seed) {
    EXPECT_EQ(Run({"matmul", "m", "w", "--random", "3", "--seed", seed}), kOk) << err_;
    return server_.inference.last_matmul.activations().raw();
  };
  const std::string first = draw("1");
  EXPECT_EQ(first.size(), 3u * 4 * 2);
  EXPECT_EQ(draw("1"), first);
  EXPECT_NE(draw("2"), first);
  EXPECT_EQ(Run({"matmul", "m", "w", "--random", "0"}), kOk);
  EXPECT_EQ(Run({"matmul", "m", "nowhere", "--random", "1"}), kCallFailed);
  EXPECT_THAT(err_, HasSubstr("no weight 'nowhere'"));
  EXPECT_EQ(Run({"matmul", "m", "w", Path("absent.npy")}), kFileFailed);
  EXPECT_EQ(Run({"matmul", "m", "w", Doubles("d.npy", {0})}), kFileFailed);
}

TEST_F(AwqctlTest, MatmulAtRandomDrawsNothingThatNoRequestHolds) {
  server_.repository.k = 32;
  EXPECT_EQ(Run({"matmul", "m", "w", "--random", "16777216", "--dtype", "fp32"}), kBadArguments);
  EXPECT_EQ(err_,
            "awqctl: --random: got 16777216 x 32 values of FP32, expected at most 536854528\n");
  server_.repository.k = int64_t{1} << 60;
  EXPECT_EQ(Run({"matmul", "m", "w", "--random", "16777216"}), kBadArguments);
  EXPECT_THAT(err_, HasSubstr("--random: got 16777216 x 1152921504606846976 values"));
}

TEST_F(AwqctlTest, HealthcheckExitsLikeTheProbe) {
  EXPECT_EQ(Run({"healthcheck"}), kOk);
  EXPECT_EQ(out_, "SERVING\n");
  EXPECT_EQ(Run({"healthcheck", "--service", "unknown"}), kCallFailed);
  EXPECT_EQ(RunAlone({"--address", "127.0.0.1:1", "healthcheck"}), kCannotConnect);
  EXPECT_EQ(RunAlone({"healthcheck", "--wait", "soon"}), kBadArguments);
  server_.health.not_serving_first = server_.health.checks + 1;
  EXPECT_EQ(Run({"healthcheck"}), kNotServing);
  EXPECT_EQ(out_, "NOT_SERVING\n");
  server_.health.not_serving_first = server_.health.checks + 3;
  EXPECT_EQ(Run({"healthcheck", "--wait", "20"}), kOk);
}

}  // namespace
}  // namespace awqd::awqctl
