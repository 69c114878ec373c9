// Fuzzes the safetensors reader with whole files, and reads every tensor that it accepts.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "kernels/checkpoint/containers/safetensors.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;

awqd::UniqueFd FileOf(const uint8_t* data, size_t size) {
  awqd::UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC));
  Require(fd.ok());
  Require(pwrite(fd.get(), data, size, 0) == static_cast<ssize_t>(size));
  return fd;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::StatusOr<awqd::model::File> file = awqd::model::File::Adopt(FileOf(data, size), "fuzz");
  Require(file.ok());
  const auto tensors = awqd::model::OpenSafetensors(*std::move(file));
  if (!tensors.ok()) {
    Require(tensors.status().code() == absl::StatusCode::kInvalidArgument);
    return 0;
  }
  int64_t covered = 0;
  for (const auto& [name, tensor] : tensors->tensors()) {
    Require(tensor.bytes() >= 0 && tensor.bytes() <= static_cast<int64_t>(size));
    std::vector<uint8_t> bytes(tensor.bytes());
    Require(tensors->Read(tensor, absl::MakeSpan(bytes)).ok());
    covered += tensor.bytes();
  }
  Require(covered < static_cast<int64_t>(size));
  return 0;
}
