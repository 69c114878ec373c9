// Regions: the names that clients give to memory that they share with the server, for requests of
// any protocol.
//
// A region of POSIX shared memory is a name and three values, no more: nothing is opened or mapped
// until a request names it, and then by the same SharedMemory, with the same rules, as an object
// that the request itself names. So a region of a client that died holds no memory, and
// unregistering one while it is in use disturbs nobody. A region of a GPU is mapped until it is
// unregistered and no request uses it.
//
// The end of a connection does not tell that a client died: Triton's clients register on one
// connection and may use another. The object does. A region whose object was removed or replaced
// is dropped, so that its name is free again. A killed client leaves its object behind, and its
// successor may register the same range of it once more. A region of a GPU is dropped with the
// connection that registered it, as far as that is known (Region::registered_by).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/base/mutex.h"
#include "server/obs/snapshot.h"
#include "server/services/memory/device_region.h"
#include "server/services/memory/shared_memory.h"
#include "server/transport/call.h"

namespace awqd::services {

struct Region {
  std::string name;  // 1 to 128 bytes
  std::string key;   // of shm_open, without the slash; empty for a GPU's
  int64_t offset = 0;
  int64_t size = 0;
  std::optional<SharedMemory::ObjectId> object = std::nullopt;  // when it was registered
  std::shared_ptr<const DeviceRegion> device_memory = nullptr;  // of a GPU
  std::string registered_by;                                    // peer, for a GPU's

  friend bool operator==(const Region&, const Region&) = default;
};
enum class RegionKind { kSystem, kDevice };

// The owner of the regions that a caller may use.
inline std::string OwnerName(const security::IdentityPtr& identity) {
  return identity == nullptr ? "" : identity->name;
}

// Thread-safe. Each owner, an identity, sees its own regions alone; without identities all callers
// are one owner, "".
class Regions {
 public:
  // The most regions of one owner.
  static constexpr size_t kMaxRegions = 256;
  static constexpr size_t kMaxNameBytes = 128;

  // `memory`, which outlives this, knows the objects. `takes_devices`: memory of GPUs is allowed.
  // `connected`: whether a peer, as gRPC spells it, is still connected; true where nobody knows.
  // Null: all are.
  using IsConnected = std::function<bool(const std::string& peer)>;
  explicit Regions(SharedMemory* memory, bool takes_devices = false,
                   IsConnected connected = nullptr)
      : memory_(memory), takes_devices_(takes_devices), connected_(std::move(connected)) {}

  // INVALID_ARGUMENT a bad name; ALREADY_EXISTS another region has the name; RESOURCE_EXHAUSTED the
  // owner has too many. Drops regions of one other owner as well, the next in turn: an owner may
  // never come back.
  absl::Status Register(const std::string& owner, Region region);
  // One, or all of the kind where `name` is empty. Nothing happens where there is none.
  void Unregister(const std::string& owner, const std::string& name, RegionKind kind);
  // One, or all of the kind where `name` is empty; sorted. NOT_FOUND no region of that name.
  absl::StatusOr<std::vector<Region>> List(const std::string& owner, const std::string& name,
                                           RegionKind kind);
  // How many all owners have.
  size_t size() const;
  // Drops the regions of GPUs whose clients are gone, and returns those that are left.
  obs::SharedDeviceMemoryStats SweepDevices();
  // The NOT_FOUND of a name without a region.
  static absl::Status NoRegion(absl::string_view name);

  // The memory that `range` names: of its region, or else of an object. INVALID_ARGUMENT about
  // `field` when there is no such region, or it ends before the range does; else as
  // SharedMemory::Open.
  absl::StatusOr<SharedRange> Open(const std::string& owner, const v1::SharedMemory& range,
                                   SharedMemory::Access access, absl::string_view field) const;

 private:
  using ByName = std::map<std::string, Region>;

  // Regions that are out of the table and yet to be unmapped, which may wait for the GPU: declared
  // before the lock, so that nobody else waits.
  using Dropped = std::vector<ByName::node_type>;

  // Takes those regions of the owner out, and the owner where none is left.
  void Drop(const std::string& owner, absl::FunctionRef<bool(const Region&)> condition,
            Dropped* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Drops the regions of the owner whose objects or clients are gone, and says so in the log.
  void DropGone(const std::string& owner, Dropped* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Region> Find(const std::string& owner, const v1::SharedMemory& range,
                              absl::string_view field) const;

  SharedMemory* const memory_;
  const bool takes_devices_;
  const IsConnected connected_;
  mutable Mutex mu_;
  std::map<std::string, ByName> regions_ ABSL_GUARDED_BY(mu_);  // by owner; none is empty
  std::string swept_ ABSL_GUARDED_BY(mu_);                      // the owner whose turn was last
};

}  // namespace awqd::services
