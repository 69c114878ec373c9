// What a flag of awqctl may say: numbers within bounds, and words that stand for values.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "client/awqctl/flags.h"
#include "client/command_line/spelling.h"

namespace awqd::awqctl {

// Refuses what is no number from `min` to `max`. NaN, which CLI::Range lets pass, is none.
CLI::Validator NumberFrom(double min, double max);

template <typename T>
using Words = std::vector<std::pair<std::string, T>>;

// A flag that says one of `words`, in either case, for `target`. CLI::CheckedTransformer would take
// the numbers behind the words too.
template <typename T>
CLI::Option* AddWord(CLI::App* app, const std::string& flag, T& target, const Words<T>& words,
                     const std::string& help) {
  return app->add_option_function<std::string>(
      flag,
      [flag, words, &target](const std::string& text) {
        std::vector<std::string> names;
        for (const auto& [name, value] : words) {
          names.push_back(name);
          if (absl::AsciiStrToLower(text) != name) continue;
          target = value;
          return;
        }
        throw CLI::ValidationError(flag,
                                   "got '" + text + "', expected " + command_line::OneOf(names));
      },
      help);
}

// --dtype and its like: fp16, bf16 or fp32.
CLI::Option* AddDType(CLI::App* app, const std::string& flag, v1::DType& target,
                      const std::string& help);
// --path: auto, fused or dequantize.
CLI::Option* AddPath(CLI::App* app, v1::Path& target);
// --activation_function: none, relu, gelu or silu.
CLI::Option* AddActivationFunction(CLI::App* app, v1::ActivationFunction& target);

// --quantize_activations: none, per_token, static or declared.
CLI::Option* AddQuantization(CLI::App* app, v1::ActivationQuantization& target);

// Certificates and tokens, for every command that asks a server. `app` must not outlive `security`.
void AddSecurityFlags(CLI::App* app, client::Security& security);

// awqctl token. `app` must not outlive `flags`.
void AddTokenCommand(CLI::App* app, Flags& flags);

// awqctl inspect, diff, quantize and convert. `app` must not outlive `flags`.
void AddToolCommands(CLI::App* app, Flags& flags);

// Every flag of awqctl bench. `sub` must not outlive `flags`.
void AddBenchFlags(CLI::App* sub, BenchFlags& flags);

}  // namespace awqd::awqctl
