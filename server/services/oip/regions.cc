// A bounded table. A range is opened once when it is registered, so that the client hears then of
// one that cannot be used.
#include "server/services/oip/regions.h"

#include <limits>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::services::oip {
namespace {

absl::Status CheckOn(const Env& env) {
  if (!env.shared_memory->prefix().empty()) return absl::OkStatus();
  return absl::UnimplementedError(
      "shared memory: this server takes no tensors in it: it runs without --shared_memory_prefix");
}

absl::StatusOr<int64_t> ToSigned(uint64_t value, absl::string_view field) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return static_cast<int64_t>(value);
  }
  return wire::FieldError(field, absl::StrCat(value), "less than 2^63");
}

// The fields of awqd.v1.SharedMemory, as this protocol calls them.
absl::Status RenameFields(const absl::Status& status) {
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

absl::Status Regions::Register(const std::string& owner, Region region) {
  if (region.name.empty() || region.name.size() > kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(region.name.size(), " bytes"),
                            absl::StrCat("1 to ", kMaxNameBytes));
  }
  MutexLock lock(&mu_);
  const Key key(owner, region.name);
  if (regions_.contains(key)) {
    return wire::WithField(absl::AlreadyExistsError(absl::StrCat(
                               "name: a region \"", obs::LogText(region.name, kMaxNameBytes),
                               "\" is registered already")),
                           "name");
  }
  size_t& count = counts_[owner];
  if (count >= kMaxRegions) {
    return absl::ResourceExhaustedError(absl::StrCat("regions: got one more, expected at most ",
                                                     kMaxRegions, "; unregister some first"));
  }
  ++count;
  regions_.emplace(key, std::move(region));
  return absl::OkStatus();
}

void Regions::Unregister(const std::string& owner, const std::string& name) {
  MutexLock lock(&mu_);
  const auto count = counts_.find(owner);
  if (count == counts_.end()) return;
  if (name.empty()) {
    for (auto it = regions_.lower_bound({owner, ""});
         it != regions_.end() && it->first.first == owner;) {
      it = regions_.erase(it);
    }
    counts_.erase(count);
  } else if (regions_.erase({owner, name}) > 0 && --count->second == 0) {
    counts_.erase(count);
  }
}

absl::StatusOr<std::vector<Region>> Regions::List(const std::string& owner,
                                                  const std::string& name) const {
  std::vector<Region> out;
  MutexLock lock(&mu_);
  for (auto it = regions_.lower_bound({owner, name});
       it != regions_.end() && it->first.first == owner; ++it) {
    if (!name.empty() && it->first.second != name) break;
    out.push_back(it->second);
  }
  if (!name.empty() && out.empty()) {
    return wire::WithField(
        absl::NotFoundError(absl::StrCat("name: no region \"", obs::LogText(name, kMaxNameBytes),
                                         "\" is registered")),
        "name");
  }
  return out;
}

absl::Status Regions::Resolve(const std::string& owner, absl::string_view field,
                              v1::SharedMemory* range) const {
  MutexLock lock(&mu_);
  const auto it = regions_.find({owner, range->name()});
  if (it == regions_.end()) {
    return wire::FieldError(absl::StrCat(field, ".name"),
                            absl::StrCat("\"", obs::LogText(range->name(), kMaxNameBytes), "\""),
                            "the name of a region that SystemSharedMemoryRegister was told");
  }
  const Region& region = it->second;
  if (range->size() > region.size || range->offset() > region.size - range->size()) {
    return wire::FieldError(absl::StrCat(field, ".size"),
                            absl::StrCat(range->size(), " from byte ", range->offset(), " on"),
                            absl::StrCat("a range within the region's ", region.size, " bytes"));
  }
  range->set_name(region.key);
  range->set_offset(region.offset + range->offset());  // the object has so many bytes
  return absl::OkStatus();
}

absl::Status RegisterRegion(const Env& env, Regions* regions, const std::string& owner,
                            const inference::SystemSharedMemoryRegisterRequest& request) {
  AWQD_RETURN_IF_ERROR(CheckOn(env));
  Region region = {.name = request.name(),
                   .key = std::string(absl::StripPrefix(request.key(), "/"))};
  AWQD_ASSIGN_OR_RETURN(region.offset, ToSigned(request.offset(), "offset"));
  AWQD_ASSIGN_OR_RETURN(region.size, ToSigned(request.byte_size(), "byte_size"));
  v1::SharedMemory range;
  range.set_name(region.key);
  range.set_offset(region.offset);
  range.set_size(region.size);
  const absl::Status opened =
      env.shared_memory->Open(range, SharedMemory::Access::kRead, "key").status();
  if (!opened.ok()) return RenameFields(opened);
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
