// The flags of awqctl bench.
#pragma once

#include <string>

#include "client/bench/plan.h"

namespace CLI {
class App;
}  // namespace CLI

namespace awqd::awqctl {

struct BenchFlags {
  bench::Plan plan;
  bool shared_memory = false;
  std::string svg;        // file to write, empty: none
  std::string json_file;  // likewise
};

// Adds every flag to `sub`, which must not outlive `flags`. Reads those of `flags` that the
// subcommand parsed; CLI11 reports what is wrong with one.
void AddBenchFlags(CLI::App* sub, BenchFlags& flags);

// Empty, or what is wrong with the flags together.
std::string CheckBenchFlags(const BenchFlags& flags);

}  // namespace awqd::awqctl
