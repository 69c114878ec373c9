// SharedMemory: a POSIX shared-memory object for tensors that a server on this machine reads and
// writes in place of messages, when it runs with --shared_memory_prefix.
//
//   auto memory = SharedMemory::Create(server_info.limits().shared_memory_prefix(), in + out);
//   std::memcpy(memory->data(), x, in);
//   MatmulCall call = {.weight = ..., .activations = {v1::FP16, {tokens, k}, ""},
//                      .shared_activations = memory->Range(0, in),
//                      .shared_output = memory->Range(in, out)};
//
// One object may hold the tensors of many requests, but writes to one object take turns in the
// kernel: clients with many large requests in flight fare better with an object for each.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/tensor.pb.h"
#include "client/remove_on_signal.h"

namespace awqd::client {

// Owns the object and its mapping. Move-only.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  // Removes it, as do signals where RemoveFilesOnSignals was called. What the server still has open
  // stays there until it closes it.
  ~SharedMemory();

  // A new object of zeros, named by `prefix` and 128 random bits: its name is all that keeps other
  // clients of the server from it. `mode`: the server's user has to read and write it.
  // RESOURCE_EXHAUSTED or UNAVAILABLE when the system refuses.
  static absl::StatusOr<SharedMemory> Create(absl::string_view prefix, int64_t bytes,
                                             mode_t mode = 0600);

  char* data() const { return data_; }
  int64_t size() const { return size_; }
  const std::string& name() const { return name_; }

  // Bytes [offset, offset + size) as requests name them.
  v1::SharedMemory Range(int64_t offset, int64_t size) const;

 private:
  std::string name_;
  RemoveOnSignal on_signal_;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace awqd::client
