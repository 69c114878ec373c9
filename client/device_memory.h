// DeviceMemory: memory of a GPU for tensors that a server on this machine reads and writes there,
// when it runs with --cuda_shared_memory.
//
//   auto memory = *DeviceMemory::Allocate(0, in + out);
//   auto region = *client->ShareMemory(memory->Request("r"));
//   MatmulCall call = {.weight = ..., .activations = {v1::FP16, {tokens, k}, ""},
//                      .shared_activations = DeviceMemory::Range("r", 0, in),
//                      .shared_output = DeviceMemory::Range("r", in, out)};
//
// It needs the CUDA driver, which is opened when it is first needed, and nothing to link.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "kernels/base/unique_fd.h"

namespace awqd::client {

// Thread-safe.
class DeviceMemory {
 public:
  // How the server maps it: by a handle of CUDA IPC; or, by the socket of a ring (Ring::ShareMemory),
  // a descriptor of the driver's own memory (VMM).
  enum class Kind { kIpc, kDescriptor };

  // `gpu`: its number among those that this process may use. FAILED_PRECONDITION without a driver
  // or such a GPU, RESOURCE_EXHAUSTED without room.
  static absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(int gpu, int64_t bytes,
                                                                Kind kind = Kind::kIpc);
  // Frees it. The server has its own mapping until the region ends.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  int64_t bytes() const { return bytes_; }
  // Copies, and returns when the copy is done. INVALID_ARGUMENT beyond the memory.
  absl::Status Write(int64_t offset, absl::string_view bytes) const;
  absl::StatusOr<std::string> Read(int64_t offset, int64_t bytes) const;

  // Shares all of it as `region`.
  v1::ShareMemoryRequest Request(absl::string_view region) const;
  // Negative where the request has a handle.
  int descriptor() const { return descriptor_.get(); }
  // Bytes of it, as requests name them.
  static v1::SharedMemory Range(absl::string_view region, int64_t offset, int64_t size);

 private:
  explicit DeviceMemory(int64_t bytes) : bytes_(bytes) {}

  absl::Status AllocateShared();
  absl::Status MapShared(int device);
  absl::Status CheckRange(int64_t offset, int64_t bytes) const;

  const int64_t bytes_;
  int device_ = -1;
  void* context_ = nullptr;  // the device's primary one
  uint64_t address_ = 0;
  size_t mapped_ = 0;  // bytes of a mapping; 0: memory of cuMemAlloc
  std::string handle_, bus_id_;
  UniqueFd descriptor_;
};

}  // namespace awqd::client
