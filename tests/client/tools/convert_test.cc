// Convert: every golden into every target, verified; refusals; and aborted runs, which leave
// nothing.
#include "client/tools/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "client/tools/diff.h"
#include "client/tools/elements.h"
#include "client/tools/inspect.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/client/tools/convert_fixture.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;

using ConvertTest = ConvertFixture;

// A conversion would lose the weights that cannot be read.
TEST_F(ConvertTest, ALinearThatCannotBeReadRefusesAll) {
  auto tensors = Merge(AwqLinear("a.up", 64, 16, 32), AwqLinear("b.up", 64, 16, 32));
  tensors.erase("b.up.qzeros");
  folder_.Write("m/config.json", AwqConfig());
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  EXPECT_THAT(Refusal(To(kDenseTarget, folder_.At("m"))),
              ::testing::AllOf(HasSubstr("weight \"b.up\": tensor \"qzeros\" is missing"),
                               HasSubstr("1 quantised linears of m cannot be read")));
}

// "gate" leaves out the router and no projection whose name begins with it: no bare codes get into
// a dense copy.
TEST_F(ConvertTest, ALeftOutModuleWhoseNameBeginsAnothers) {
  folder_.Write(
      "m/config.json",
      R"({"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["gate"]}})");
  folder_.Write("m/model.safetensors",
                SafetensorsOf({{"l.gate.weight", {"F16", {1, 2}, "abcd"}},
                               {"l.gate_proj.weight", {"F8_E4M3", {1, 2}, "\x38\xb8"}},
                               {"l.gate_proj.weight_scale", {"F32", {1}, {"\0\0\x80\x40", 4}}}}));
  ConvertOptions options = To(kDenseTarget, folder_.At("m"));
  options.dtype = "F32";
  const auto got = Convert(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto out = Model::Open(folder_.At("out"));
  ASSERT_TRUE(out.ok()) << out.status();
  ASSERT_EQ(out->tensors().all().size(), 2u);
  const model::TensorLocation* const weight = out->tensors().Find("l.gate_proj.weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->info->dtype, "F32");
  std::vector<float> values(2);
  ASSERT_TRUE(
      ReadPart(*weight, 0, {reinterpret_cast<uint8_t*>(values.data()), 2 * sizeof(float)}).ok());
  EXPECT_THAT(values, ::testing::ElementsAre(4.0f, -4.0f));
}

TEST_F(ConvertTest, EveryGoldenFolderIntoEveryTarget) {
  std::map<std::string, int> done, exact;
  for (const Format* format : AllFormats()) {
    for (const auto& entry : fs::directory_iterator(DataPath(std::string(format->name)))) {
      const bool file = entry.path().extension() == ".safetensors";  // one of ComfyUI
      if (!file && !fs::exists(entry.path() / "config.json")) continue;
      for (const Target* target : AllTargets()) {
        ConvertOptions options = To(*target, entry.path());
        options.verify = target->format.empty() || FormatNamed(target->format) != nullptr;
        const bool mixed = target == &kMlxTarget || target == &kGgufTarget;
        if (target == &kDenseTarget || mixed) options.dtype = "F32";
        const auto got = Convert(options, Quiet);
        const std::string what = std::string(target->name) + " " + entry.path().string();
        if (!got.ok()) {
          EXPECT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument)
              << what << ": " << got.status();
          EXPECT_THAT(std::string(got.status().message()), HasSubstr("linear ")) << what;
        } else if (options.verify) {
          EXPECT_EQ(got->verified->linears, static_cast<int64_t>(got->linears.size())) << what;
          EXPECT_EQ(got->verified->rounded, 0) << what;
          EXPECT_GT(got->verified->elements, 0) << what;
        }
        done[std::string(target->name)] += got.ok() ? 1 : 0;
        for (const ConvertedLinear& linear : got.ok() ? got->linears : decltype(got->linears)()) {
          exact[std::string(target->name)] += linear.dense ? 0 : 1;
        }
        EXPECT_FALSE(fs::exists(folder_.At("out.partial"))) << what;
        fs::remove_all(folder_.At("out"));
      }
    }
  }
  EXPECT_GE(done["awq"], 3);
  EXPECT_GE(done["gptq"], 12);
  EXPECT_GE(done["compressed-tensors"], 10);
  EXPECT_GE(done["gemlite"], 15);
  EXPECT_GE(done["ft"], 4);
  EXPECT_GE(done["dense"], 35);
  EXPECT_GE(done["mlx"], 35);
  EXPECT_GE(exact["mlx"], 150);
  EXPECT_GE(done["gguf"], 30);
  EXPECT_GE(exact["gguf"], 80);
}

TEST_F(ConvertTest, ThereAndBackIsTheSameFile) {
  const std::string source = DataPath("awq/all-MiniLM-L6-v2-awq");
  ConvertOptions options = To(kGptqTarget, source);
  auto got = Convert(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->from, "awq");
  EXPECT_EQ(got->verified->tensors, got->carried.tensors);
  options = {.folder = folder_.At("out"), .output = folder_.At("back"), .target = &kAwqTarget};
  got = Convert(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto difference = Diff(source, folder_.At("back"), 1, Quiet);
  ASSERT_TRUE(difference.ok()) << difference.status();
  EXPECT_TRUE(difference->same()) << ToJson(*difference).dump();
  const auto first = Model::Open(source), second = Model::Open(folder_.At("back"));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->tensors().FileNames(), second->tensors().FileNames());
  for (const auto& [name, place] : first->tensors().all()) {
    ASSERT_NE(second->tensors().Find(name), nullptr) << name;
    EXPECT_TRUE(*SameBytes(place, *second->tensors().Find(name))) << name;
  }
}

TEST_F(ConvertTest, DenseSaysWhatItRounds) {
  ConvertOptions options = To(kDenseTarget, DataPath("plain/w4-bf16"));
  options.dtype = "BF16";
  const auto got = Convert(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_GT(got->verified->rounded, 0);
  const auto config = nlohmann::json::parse(TextOf(folder_.At("out/config.json")));
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  EXPECT_FALSE(config.contains("quantization_config"));
  const auto told = nlohmann::json::parse(TextOf(folder_.At("out/verified.json")));
  EXPECT_EQ(told.at("elements_rounded_once"), got->verified->rounded);
  EXPECT_EQ(told.at("elements_bit_for_bit"), got->verified->elements - got->verified->rounded);
  const auto seen = Inspect(folder_.At("out"), Quiet);
  ASSERT_TRUE(seen.ok());
  EXPECT_THAT(seen->error, HasSubstr("the model is not quantised"));
}

TEST_F(ConvertTest, ExpertsThatShareTensorsGetTheirOwn) {
  const auto got = Convert(To(kDenseTarget, DataPath("mxfp4/experts")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_GT(got->linears.size(), 1u);
  EXPECT_TRUE(got->linears[0].slice);
  const auto model = Model::Open(folder_.At("out"));
  ASSERT_TRUE(model.ok());
  EXPECT_NE(model->tensors().Find(got->linears[1].path + ".weight"), nullptr);
}

TEST_F(ConvertTest, GptqSaysWhatDiffersBetweenLinears) {
  const auto got = Convert(To(kGptqTarget, DataPath("auto-round/true-zeros")), Quiet);
  ASSERT_FALSE(got.ok());  // it has 5 bits, which v1 cannot hold
  EXPECT_THAT(std::string(got.status().message()),
              HasSubstr("expected integers of 2, 3, 4, 8 bits"));
  folder_.Write("m/config.json",
                R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":32,)"
                R"("checkpoint_format":"gptq_v2","dynamic":{"b":{"group_size":16}}}})");
  auto tensors = AwqLinear("a", 8, 16, 8), other = AwqLinear("b.up", 8, 16, 4);
  for (auto* linear : {&tensors, &other}) {
    for (auto& [name, tensor] : *linear) {
      // GPTQ's codes run along K: 8 rows of them are 64.
      if (name.find("qweight") != name.npos) tensor.shape[1] = 16;
      if (name.find("qweight") != name.npos) tensor.bytes.resize(8 * 16 * 4, '\x21');
    }
  }
  other["b.up.qzeros"] = {"I32", {4, 2}, std::string(32, '\x11')};
  other["b.up.scales"] = {"F16", {4, 16}, std::string(128, '\x2c')};
  tensors["a.qzeros"] = {"I32", {2, 2}, std::string(16, '\x11')};
  tensors["a.scales"] = {"F16", {2, 16}, std::string(64, '\x2c')};
  folder_.Write("m/model.safetensors", SafetensorsOf(Merge(tensors, other)));
  const auto mixed = Convert(To(kGptqTarget, folder_.At("m")), Quiet);
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  const auto config = nlohmann::json::parse(TextOf(folder_.At("out/config.json")));
  const auto& settings = config.at("quantization_config");
  EXPECT_EQ(settings.at("dynamic").size(), 1u);
  EXPECT_EQ(mixed->verified->linears, 2);
  fs::remove_all(folder_.At("out"));
  EXPECT_THAT(Refusal(To(kAwqTarget, folder_.At("m"))),
              HasSubstr("the format has one group_size for all"));
}

// x @ W is that of the source, where activations are multiplied by the factor first.
TEST_F(ConvertTest, ADenseCopyHasTheFactorInIt) {
  ConvertOptions options = To(kDenseTarget, DataPath("modelopt/awq"));
  options.dtype = "F32";
  const auto converted = Convert(options, Quiet);
  ASSERT_TRUE(converted.ok()) << converted.status();
  const auto source = Model::Open(DataPath("modelopt/awq")), written = Model::Open(options.output);
  ASSERT_TRUE(source.ok() && written.ok()) << source.status() << written.status();
  const auto* const linear = source->FindLinear("layers.0.up_proj");
  ASSERT_NE(linear, nullptr);
  std::vector<uint8_t> scratch;
  const auto weight = source->checkpoint()->Read(*linear, &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_FALSE(weight->factor.empty());
  const auto dense = ReadElements(*written, "layers.0.up_proj");
  ASSERT_TRUE(dense.ok()) << dense.status();
  std::vector<float> elements(weight->k * weight->n);
  ASSERT_TRUE(dense->Read(0, weight->n, elements.data()).ok());
  for (int64_t k = 0; k < weight->k; ++k) {
    for (int64_t n = 0; n < weight->n; ++n) {
      ASSERT_EQ(elements[k * weight->n + n], WeightValue(*weight, k, n) * weight->factor[k]);
    }
  }
}

TEST_F(ConvertTest, RefusesByTheLinearsName) {
  EXPECT_THAT(Refusal(To(kAwqTarget, DataPath("gptq/v2-act"))), HasSubstr("linear \""));
  EXPECT_THAT(Refusal(To(kGptqTarget, DataPath("fp8/blocks"))), HasSubstr("codes: got e4m3"));
  EXPECT_THAT(Refusal(To(kGemliteTarget, DataPath("modelopt/awq"))), HasSubstr("factor: got one"));
  ConvertOptions options = To(kAwqTarget, DataPath("awq/all-MiniLM-L6-v2-awq"));
  options.dtype = "F16";
  EXPECT_THAT(Refusal(options), HasSubstr("dtype: got F16"));
  folder_.Write("dense/config.json", "{}");
  folder_.Write("dense/model.safetensors",
                SafetensorsOf({{"a.weight", {"F16", {2, 2}, std::string(8, '\0')}}}));
  EXPECT_THAT(Refusal(To(kAwqTarget, folder_.At("dense"))), HasSubstr("not quantised"));
}

TEST_F(ConvertTest, ATensorThatIsInTheWayIsNamed) {
  auto tensors = AwqLinear("a", 64, 16, 32);
  tensors["a.g_idx"] = {"I32", {64}, std::string(256, '\0')};  // not part of an AWQ linear
  folder_.Write("m/config.json", AwqConfig());
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  EXPECT_THAT(Refusal(To(kGptqTarget, folder_.At("m"))),
              HasSubstr("tensor \"a.g_idx\": format awq has no such tensor"));
}

TEST_F(ConvertTest, VerifyFindsOneBit) {
  ASSERT_TRUE(Convert(To(kGptqTarget, DataPath("awq/all-MiniLM-L6-v2-awq")), Quiet).ok());
  const auto source = Model::Open(DataPath("awq/all-MiniLM-L6-v2-awq"));
  ASSERT_TRUE(source.ok());
  const std::string file = folder_.At("out/model-00001-of-00002.safetensors");
  const auto whole = Verify(*source, folder_.At("out"), 0, {}, Quiet);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto written = Model::Open(folder_.At("out"));
  ASSERT_TRUE(written.ok());
  for (const char* suffix : {".qweight", ".scales", ".bias"}) {
    const std::string name = "encoder.layer.0.intermediate.dense" + std::string(suffix);
    const auto& place = *written->tensors().Find(name);
    std::vector<uint8_t> bytes(1);
    ASSERT_TRUE(ReadPart(place, 0, absl::MakeSpan(bytes)).ok());
    uint64_t header = 0;
    std::fstream open(folder_.At("out/") + fs::path(place.file->file().name()).filename().string(),
                      std::ios::binary | std::ios::in | std::ios::out);
    open.read(reinterpret_cast<char*>(&header), 8);
    const auto flip = [&] {
      open.seekg(static_cast<int64_t>(8 + header) + place.info->begin);
      const char byte = static_cast<char>(open.get() ^ 1);
      open.seekp(static_cast<int64_t>(8 + header) + place.info->begin);
      open.put(byte).flush();
    };
    flip();
    const auto broken = Verify(*source, folder_.At("out"), 0, {}, Quiet);
    EXPECT_THAT(std::string(broken.status().message()), HasSubstr("encoder.layer.0.intermediate"));
    flip();
  }
  EXPECT_TRUE(Verify(*source, folder_.At("out"), 0, {}, Quiet).ok());
}

// A run that ends by `signal` after its first tensor; returns whether the signal ended it.
bool EndedBy(int signal, const ConvertOptions& options) {
  const pid_t child = fork();
  if (child == 0) {
    const auto end = [&](int64_t, int64_t) { raise(signal); };
    _exit(Convert(options, end).ok() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

TEST_F(ConvertTest, ARunAfterAKilledOneSaysWhyNot) {
  const ConvertOptions options = To(kGptqTarget, DataPath("awq/all-MiniLM-L6-v2-awq"));
  ASSERT_TRUE(EndedBy(SIGKILL, options));
  EXPECT_FALSE(fs::exists(folder_.At("out")));
  ASSERT_TRUE(fs::exists(folder_.At("out.partial")));
  EXPECT_THAT(std::string(Convert(options, Quiet).status().message()),
              HasSubstr("left by a run that was killed; remove it first"));
  fs::remove_all(folder_.At("out.partial"));
  EXPECT_TRUE(Convert(options, Quiet).ok());
}

}  // namespace
}  // namespace awqd::tools
