// A borrower of weights in a test: a lease by libawqd on the CPU, and products by a leased weight.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/library/awqd.h"

namespace awqd::testing {

// Addresses at which a process has mapped memory of lent weights.
inline std::vector<uintptr_t> FindMappings(pid_t pid = getpid()) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  std::vector<uintptr_t> out;
  for (std::string line; std::getline(maps, line);) {
    if (!absl::StrContains(line, "awqd-weights")) continue;
    out.push_back(std::strtoull(line.c_str(), nullptr, 16));
  }
  return out;
}

// The product that `args` describe, on the CPU, with a workspace of its own.
inline void MultiplyOnCpu(const awqd_weight* weight, const awqd_matmul_args& args) {
  awqd_workspace workspace = {nullptr, 0};
  EXPECT_EQ(awqd_matmul_workspace(weight, &args, &workspace.bytes), AWQD_OK);
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(256, (workspace.bytes / 256 + 1) * 256), &std::free);
  workspace.data = memory.get();
  EXPECT_EQ(awqd_matmul(weight, &args, workspace, nullptr), AWQD_OK) << awqd_error_message();
}

// A lease of a model, and one weight of it.
class Borrower {
 public:
  Borrower(const std::string& path, const char* linear, const char* model = "m",
           const char* token = nullptr) {
    EXPECT_EQ(awqd_device_open("cpu", nullptr, &device_), AWQD_OK) << awqd_error_message();
    code_ = awqd_lease_open(device_, path.c_str(), model, token, &lease_);
    error_ = code_ == AWQD_OK ? "" : awqd_error_message();
    if (code_ != AWQD_OK) return;
    EXPECT_EQ(awqd_lease_weight(lease_, linear, &weight_), AWQD_OK) << awqd_error_message();
  }
  ~Borrower() {
    awqd_weight_free(weight_);
    awqd_lease_close(lease_);
    awqd_device_close(device_);
  }
  Borrower(const Borrower&) = delete;
  Borrower& operator=(const Borrower&) = delete;

  int code() const { return code_; }
  const std::string& error() const { return error_; }
  int64_t version() const { return awqd_lease_model_version(lease_); }
  const awqd_weight* weight() const { return weight_; }

 private:
  awqd_device* device_ = nullptr;
  awqd_lease* lease_ = nullptr;
  awqd_weight* weight_ = nullptr;
  int code_ = 0;
  std::string error_;
};

}  // namespace awqd::testing
