// A range is opened once when it is registered, so that what cannot work is said then.
#include "server/services/oip/shared_regions.h"

#include <limits>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "server/wire/status.h"

namespace awqd::services::oip {
namespace {

absl::Status CheckOn(const Env& env) {
  if (!env.shared_memory->prefix().empty()) return absl::OkStatus();
  return absl::UnimplementedError(
      "shared memory: this server takes no tensors in it: it runs without --shared_memory_prefix");
}

absl::StatusOr<int64_t> Signed(uint64_t value, absl::string_view field) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return static_cast<int64_t>(value);
  }
  return wire::FieldError(field, absl::StrCat(value), "less than 2^63");
}

// The fields of awqd.v1.SharedMemory, as this protocol calls them.
absl::Status InOurFields(const absl::Status& status) {
  constexpr std::pair<absl::string_view, absl::string_view> kWords[] = {
      {"key.name", "key"}, {"key.offset", "offset"}, {"key.size", "byte_size"}};
  const std::string field = wire::FieldOf(status);
  absl::string_view rest = status.message();
  for (const auto& [theirs, ours] : kWords) {
    if (field != theirs || !absl::ConsumePrefix(&rest, theirs)) continue;
    return wire::WithField(absl::Status(status.code(), absl::StrCat(ours, rest)), ours);
  }
  return status;
}

}  // namespace

absl::Status RegisterRegion(const Env& env, Regions* regions, const std::string& owner,
                            const inference::SystemSharedMemoryRegisterRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckOn(env));
  Region region = {.name = request.name(),
                   .key = std::string(absl::StripPrefix(request.key(), "/"))};
  AWQD_ASSIGN_OR_RETURN(region.offset, Signed(request.offset(), "offset"));
  AWQD_ASSIGN_OR_RETURN(region.size, Signed(request.byte_size(), "byte_size"));
  v1::SharedMemory range;
  range.set_name(region.key);
  range.set_offset(region.offset);
  range.set_size(region.size);
  const absl::Status opened =
      env.shared_memory->Open(range, SharedMemory::Access::kRead, "key").status();
  if (!opened.ok()) return InOurFields(opened);
  return regions->Register(owner, std::move(region));
}

absl::Status UnregisterRegion(const Env& env, Regions* regions, const std::string& owner,
                              const inference::SystemSharedMemoryUnregisterRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckOn(env));
  regions->Unregister(owner, request.name());
  return absl::OkStatus();
}

absl::Status ListRegions(const Env& env, const Regions& regions, const std::string& owner,
                         const inference::SystemSharedMemoryStatusRequest& request,
                         inference::SystemSharedMemoryStatusResponse* response) {
  AWQD_RETURN_IF_ERROR(CheckOn(env));
  AWQD_ASSIGN_OR_RETURN(const std::vector<Region> found, regions.List(owner, request.name()));
  for (const Region& region : found) {
    auto& status = (*response->mutable_regions())[region.name];
    status.set_name(region.name);
    status.set_key(region.key);
    status.set_offset(region.offset);
    status.set_byte_size(region.size);
  }
  return absl::OkStatus();
}

}  // namespace awqd::services::oip
