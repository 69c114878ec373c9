// The command line of awqctl alone: valid flags, refusals and their texts.
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/awqctl/commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::awqctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::optional<Flags> Parse(const std::vector<std::string>& args) {
  std::ostringstream out, err;
  int exit_code = kOk;
  std::optional<Flags> flags = ParseFlags(args, out, err, exit_code);
  EXPECT_EQ(err.str(), "") << ::testing::PrintToString(args);
  return flags;
}

// The line that refuses `args`.
std::string Refusal(const std::vector<std::string>& args) {
  std::ostringstream out, err;
  int exit_code = kOk;
  EXPECT_FALSE(ParseFlags(args, out, err, exit_code).has_value()) << ::testing::PrintToString(args);
  EXPECT_EQ(exit_code, kBadArguments);
  return err.str();
}

TEST(AwqctlFlags, NumbersAreNumbers) {
  const std::vector<std::vector<std::string>> commands = {
      {"status", "--timeout"},
      {"healthcheck", "--wait"},
      {"compare", "a.npy", "b.npy", "--max_relative_error"},
      {"bench", "--weight", "m/w", "--duration"},
      {"bench", "--weight", "m/w", "--warmup"},
      {"bench", "--weight", "m/w", "--deadline_ms"}};
  for (std::vector<std::string> args : commands) {
    const std::string flag = args.back();
    args.push_back("");
    for (const char* value : {"nan", "-nan", "inf", "-1", "1e400", "soon"}) {
      args.back() = value;
      EXPECT_THAT(Refusal(args), HasSubstr(flag + ": got '" + value + "', expected a number from"));
    }
    args.back() = "0.5";
    EXPECT_TRUE(Parse(args).has_value());
  }
  for (const char* flag : {"--rate", "--concurrency", "--tokens"}) {
    EXPECT_THAT(Refusal({"bench", "--weight", "m/w", flag, "nan"}), HasSubstr("got 'nan'"));
  }
}

TEST(AwqctlFlags, DTypesAreWords) {
  const std::vector<std::vector<std::string>> commands = {
      {"dequantize", "m", "w", "-o", "w.npy", "--dtype"},
      {"matmul", "m", "w", "--random", "1", "--dtype"},
      {"matmul", "m", "w", "--random", "1", "--output_dtype"},
      {"bench", "--weight", "m/w", "--dtype"},
      {"bench", "--weight", "m/w", "--output_dtype"}};
  for (std::vector<std::string> args : commands) {
    const std::string flag = args.back();
    args.push_back("");
    for (const char* value : {"int8", "2", "", "fp"}) {
      args.back() = value;
      EXPECT_THAT(Refusal(args),
                  HasSubstr(flag + ": got '" + value + "', expected fp16, bf16 or fp32"));
    }
    args.back() = "BF16";
    EXPECT_TRUE(Parse(args).has_value());
  }
  EXPECT_EQ(Parse({"matmul", "m", "w", "--random", "1", "--dtype", "Fp32"})->dtype, v1::FP32);
  EXPECT_EQ(Parse({"bench", "--weight", "m/w", "--dtype", "bf16"})->bench.plan.dtype, v1::BF16);
}

TEST(AwqctlFlags, PathsAndArrivalsAreWords) {
  for (std::vector<std::string> args :
       {std::vector<std::string>{"matmul", "m", "w", "--random", "1"},
        {"bench", "--weight", "m/w"}}) {
    args.push_back("--path");
    for (const char* value : {"slow", "1"}) {
      args.push_back(value);
      EXPECT_THAT(Refusal(args), HasSubstr(std::string("--path: got '") + value +
                                           "', expected auto, fused or dequantize"));
      args.pop_back();
    }
    args.push_back("fused");
    EXPECT_TRUE(Parse(args).has_value());
  }
  EXPECT_THAT(Refusal({"matmul", "m", "w", "--random", "1", "--activation_function", "tanh"}),
              HasSubstr("--activation_function: got 'tanh', expected none, relu, gelu, silu, "
                        "gelu_tanh, swiglu_oai or situ"));
  EXPECT_THAT(Refusal({"matmul", "m", "w", "--random", "1", "--quantize_activations", "int4"}),
              HasSubstr("--quantize_activations: got 'int4', expected none, per_token, static, "
                        "declared, fp8, fp8_block, fp8_static, fp8_declared or never"));
  EXPECT_THAT(Refusal({"matmul", "m", "w", "x.npy", "--activation_scale", "1",
                       "--activation_scales", "a.npy"}),
              HasSubstr("--activation_scale"));
  EXPECT_EQ(Parse({"matmul", "m", "w", "--random", "1", "--quantize_activations", "per_token"})
                ->quantize_activations,
            v1::INT8_PER_TOKEN);
  EXPECT_EQ(Parse({"matmul", "m", "w", "--random", "1", "--quantize_activations", "fp8_declared"})
                ->quantize_activations,
            v1::FP8_AS_DECLARED);
  EXPECT_EQ(Parse({"matmul", "m", "w", "--random", "1", "--activation_function", "SiLU"})
                ->activation_function,
            v1::SILU);
  EXPECT_THAT(Refusal({"bench", "--weight", "m/w", "--arrivals", "sometimes"}),
              HasSubstr("--arrivals: got 'sometimes', expected poisson or constant"));
  EXPECT_FALSE(Parse({"bench", "--weight", "m/w", "--arrivals", "constant"})->bench.plan.poisson);
}

TEST(AwqctlFlags, ARouterComesInPlaceOfIds) {
  const std::vector<std::string> mlp = {"mlp", "m", "p", "x.npy"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), mlp.begin(), mlp.end());
    return more;
  };
  const auto flags = Parse(with({"--router_logits", "l.npy", "--top_k", "3", "--scoring", "sigmoid",
                                 "--n_group", "4", "--topk_group", "2", "--norm_topk_prob",
                                 "--routed_scaling_factor", "2.5", "--activation_limit", "7"}));
  ASSERT_TRUE(flags.has_value());
  EXPECT_EQ(flags->router.logits, "l.npy");
  EXPECT_EQ(flags->top_k, 3);
  EXPECT_EQ(flags->router.scoring, v1::SIGMOID);
  EXPECT_EQ(flags->router.n_group, 4);
  EXPECT_EQ(flags->router.topk_group, 2);
  EXPECT_TRUE(flags->router.norm_topk_prob);
  EXPECT_EQ(flags->router.routed_scaling_factor, 2.5f);
  EXPECT_EQ(flags->activation_parameters.limit(), 7);
  EXPECT_FALSE(flags->activation_parameters.has_alpha());
  EXPECT_THAT(Refusal(with({"--router_logits", "l.npy", "--expert_ids", "i.npy"})),
              HasSubstr("--expert_ids excludes --router_logits"));
  EXPECT_THAT(Refusal(with({"--n_group", "4"})), HasSubstr("--n_group requires --router_logits"));
  EXPECT_THAT(Refusal(with({"--router_logits", "l.npy", "--scoring", "tanh"})),
              HasSubstr("--scoring: got 'tanh', expected softmax, sigmoid or sqrtsoftplus"));
  EXPECT_THAT(Refusal(with({"--shared_expert_gate", "w.npy"})),
              HasSubstr("--shared_expert_gate requires --shared_expert"));
}

TEST(AwqctlFlags, NamesTheCommandThatWasMeant) {
  EXPECT_THAT(Refusal({"modles"}),
              HasSubstr("got 'modles', expected a command; did you mean 'models'?"));
  EXPECT_THAT(Refusal({"--json", "matmull", "m", "w"}), HasSubstr("did you mean 'matmul'?"));
  EXPECT_THAT(Refusal({"Status"}), HasSubstr("did you mean 'status'?"));
  const std::string far = Refusal({"bogus"});
  EXPECT_THAT(far, HasSubstr("got 'bogus', expected status, "));
  EXPECT_THAT(far,
              HasSubstr("healthcheck, bench, inspect, diff, quantize, convert, merge or token"));
  EXPECT_THAT(Refusal({"--bogus"}), HasSubstr("got '--bogus', expected status, "));
  EXPECT_THAT(Refusal({}), HasSubstr("got no command, expected status, "));
  EXPECT_THAT(Refusal({"status", "--bogus"}), HasSubstr("--bogus"));
  EXPECT_THAT(Refusal({"load"}), Not(HasSubstr("command")));
  EXPECT_THAT(Refusal({"load"}), HasSubstr("(awqctl load --help tells more)"));
}

// The output for `args`, which must succeed.
std::string Printed(const std::vector<std::string>& args) {
  std::ostringstream out, err;
  int exit_code = -1;
  EXPECT_FALSE(ParseFlags(args, out, err, exit_code).has_value());
  EXPECT_EQ(exit_code, kOk);
  EXPECT_EQ(err.str(), "");
  return out.str();
}

TEST(AwqctlFlags, AMisspelledFlagComesFirst) {
  EXPECT_THAT(Refusal({"bench", "--weigth", "m/w"}),
              HasSubstr("--weigth: did you mean --weight? (awqctl bench --help"));
  EXPECT_THAT(Refusal({"matmul", "m", "w", "--randon=8", "--dtype=int8"}),
              HasSubstr("--randon: did you mean --random?"));
  EXPECT_THAT(Refusal({"--adress=a", "status"}), HasSubstr("--adress: did you mean --address?"));
  EXPECT_THAT(Refusal({"load", "--bogus"}), HasSubstr("--bogus: no such flag"));
  EXPECT_THAT(Refusal({"unload", "m", "--require_all_weights"}),
              HasSubstr("--require_all_weights: no such flag"));
}

TEST(AwqctlFlags, HelpTellsOfOneCommandOrOfAll) {
  const std::string some = Printed({"--help"}), all = Printed({"--help=all"});
  EXPECT_EQ(some, Printed({"help"}));
  EXPECT_THAT(some, HasSubstr("\nServer:\n  status"));
  EXPECT_THAT(some, Not(HasSubstr("--warmup")));
  EXPECT_THAT(all, HasSubstr("--concurrency"));
  const std::string bench = Printed({"help", "bench"});
  EXPECT_EQ(bench, Printed({"bench", "--help"}));
  EXPECT_THAT(bench, HasSubstr("--concurrency"));
  EXPECT_THAT(bench, HasSubstr("awqctl bench"));
  for (const std::string& help : {some, all, bench}) {
    for (const absl::string_view line : absl::StrSplit(help, '\n')) {
      EXPECT_LE(line.size(), 80u) << line;
    }
  }
  EXPECT_THAT(Refusal({"help", "bnech"}), HasSubstr("did you mean 'bench'?"));
}

TEST(AwqctlFlags, HelpListsTheValuesOfAFlag) {
  const std::string matmul = Printed({"help", "matmul"});
  EXPECT_THAT(matmul, HasSubstr("\n  --path auto|fused|dequantize\n"));
  EXPECT_THAT(matmul, HasSubstr("\n  --output_dtype fp16|bf16|fp32\n"));
  EXPECT_THAT(matmul, HasSubstr("How to compute (default auto)"));
  EXPECT_THAT(Printed({"help", "convert"}),
              HasSubstr("\n  --to awq|gptq|compressed-tensors|gemlite|ft|mlx|gguf|dense\n"));
  EXPECT_THAT(Printed({"help", "token"}), HasSubstr("--roles infer|read|admin|metrics|attach,..."));
}

TEST(AwqctlFlags, Version) {
  EXPECT_THAT(Printed({"--version"}), ::testing::MatchesRegex("awqctl [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

}  // namespace
}  // namespace awqd::awqctl
