// Regions: the names that clients of the inference protocol give to ranges of shared memory.
//
// A name and three values, no more: nothing is opened or mapped until a request names a region, and
// then by the same SharedMemory, with the same rules, as a range of awqd.v1. So a region of a
// client that died holds no memory, and unregistering one while it is in use disturbs nobody.
//
// The end of a connection does not tell that a client died: Triton's clients register on one
// connection and may use another. The object does. A region whose object was removed or replaced
// is dropped, so that its name is free again. A killed client leaves its object behind, and its
// successor may register the same range of it once more.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/base/mutex.h"
#include "server/services/shared_memory.h"

namespace awqd::services::oip {

struct Region {
  std::string name;  // 1 to 128 bytes
  std::string key;   // of shm_open, without the slash
  int64_t offset = 0;
  int64_t size = 0;
  std::optional<SharedMemory::ObjectId> object = std::nullopt;  // when it was registered

  friend bool operator==(const Region&, const Region&) = default;
};

// Thread-safe. Each owner, an identity, sees its own regions alone; without identities all callers
// are one owner, "".
class Regions {
 public:
  // The most regions of one owner.
  static constexpr size_t kMaxRegions = 256;
  static constexpr size_t kMaxNameBytes = 128;

  // `memory`, which outlives this, knows the objects.
  explicit Regions(const SharedMemory* memory) : memory_(memory) {}

  // INVALID_ARGUMENT a bad name; ALREADY_EXISTS another region has the name; RESOURCE_EXHAUSTED the
  // owner has too many. Drops regions of one other owner as well, the next in turn: an owner may
  // never come back.
  absl::Status Register(const std::string& owner, Region region);
  // One, or all where `name` is empty. Nothing happens where there is none.
  void Unregister(const std::string& owner, const std::string& name);
  // One, or all where `name` is empty; sorted. NOT_FOUND no region of that name.
  absl::StatusOr<std::vector<Region>> List(const std::string& owner, const std::string& name);
  // How many all owners have.
  size_t size() const;
  // The NOT_FOUND of a name without a region.
  static absl::Status NoRegion(absl::string_view name);

  // Replaces the name of a region in `range` by its object, and adds the region's offset.
  // INVALID_ARGUMENT about `field` when there is no such region, or it ends before the range does.
  absl::Status Resolve(const std::string& owner, absl::string_view field,
                       v1::SharedMemory* range) const;

 private:
  using ByName = std::map<std::string, Region>;

  // Drops the regions of the owner whose objects are gone, says so in the log, and drops the owner
  // where none is left.
  void DropGone(const std::string& owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SharedMemory* const memory_;
  mutable Mutex mu_;
  std::map<std::string, ByName> regions_ ABSL_GUARDED_BY(mu_);  // by owner; none is empty
  std::string swept_ ABSL_GUARDED_BY(mu_);                      // the owner whose turn was last
};

}  // namespace awqd::services::oip
