// Regions: the names that clients of the inference protocol give to ranges of shared memory.
//
// A name and three values, no more: nothing is opened or mapped until a request names a region, and
// then by the same SharedMemory, with the same rules, as a range of awqd.v1. So a region of a
// client that died holds no memory, and unregistering one while it is in use disturbs nobody.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/tensor.pb.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/mutex.h"
#include "server/services/env.h"

namespace awqd::services::oip {

struct Region {
  std::string name;  // 1 to 128 bytes
  std::string key;   // of shm_open, without the slash
  int64_t offset = 0;
  int64_t size = 0;
};

// Thread-safe. Each owner, an identity, sees its own regions alone; without identities all callers
// are one owner, "".
class Regions {
 public:
  // The most regions of one owner.
  static constexpr size_t kMaxRegions = 256;
  static constexpr size_t kMaxNameBytes = 128;

  // INVALID_ARGUMENT a bad name; ALREADY_EXISTS; RESOURCE_EXHAUSTED the owner has too many.
  absl::Status Register(const std::string& owner, Region region);
  // One, or all where `name` is empty. Nothing happens where there is none.
  void Unregister(const std::string& owner, const std::string& name);
  // One, or all where `name` is empty; sorted. NOT_FOUND no region of that name.
  absl::StatusOr<std::vector<Region>> List(const std::string& owner, const std::string& name) const;

  // Replaces the name of a region in `range` by its object, and adds the region's offset.
  // INVALID_ARGUMENT about `field` when there is no such region, or it ends before the range does.
  absl::Status Resolve(const std::string& owner, absl::string_view field,
                       v1::SharedMemory* range) const;

 private:
  using Key = std::pair<std::string, std::string>;  // owner, name

  mutable Mutex mu_;
  std::map<Key, Region> regions_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, size_t> counts_ ABSL_GUARDED_BY(mu_);  // by owner
};

// The calls about one owner's regions. UNIMPLEMENTED where shared memory is off; errors of Regions,
// and of SharedMemory::Open for a range that cannot be opened now.
absl::Status RegisterRegion(const Env& env, Regions* regions, const std::string& owner,
                            const inference::SystemSharedMemoryRegisterRequest& request);
absl::Status UnregisterRegion(const Env& env, Regions* regions, const std::string& owner,
                              const inference::SystemSharedMemoryUnregisterRequest& request);
absl::Status ListRegions(const Env& env, const Regions& regions, const std::string& owner,
                         const inference::SystemSharedMemoryStatusRequest& request,
                         inference::SystemSharedMemoryStatusResponse* response);

}  // namespace awqd::services::oip
