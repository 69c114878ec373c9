// A bounded table.
#include "server/services/oip/regions.h"

#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::services::oip {

absl::Status Regions::Register(const std::string& owner, Region region) {
  if (region.name.empty() || region.name.size() > kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(region.name.size(), " bytes"),
                            absl::StrCat("1 to ", kMaxNameBytes));
  }
  MutexLock lock(&mu_);
  DropGone(owner);
  if (!regions_.empty()) {
    auto next = regions_.upper_bound(swept_);
    if (next == regions_.end()) next = regions_.begin();
    swept_ = next->first;
    DropGone(swept_);
  }
  ByName& regions = regions_[owner];
  if (const auto known = regions.find(region.name); known != regions.end()) {
    // The client that made it was killed, and started again.
    if (region.object.has_value() && region == known->second) return absl::OkStatus();
    return wire::WithField(absl::AlreadyExistsError(absl::StrCat(
                               "name: a region \"", obs::LogText(region.name, kMaxNameBytes),
                               "\" is registered already")),
                           "name");
  }
  if (regions.size() >= kMaxRegions) {
    return absl::ResourceExhaustedError(absl::StrCat("regions: got one more, expected at most ",
                                                     kMaxRegions, "; unregister some first"));
  }
  regions.emplace(region.name, region);
  return absl::OkStatus();
}

void Regions::DropGone(const std::string& owner) {
  const auto regions = regions_.find(owner);
  if (regions == regions_.end()) return;
  const size_t dropped = std::erase_if(regions->second, [&](const auto& entry) {
    const Region& region = entry.second;
    return region.object.has_value() && memory_->Identify(region.key) != region.object;
  });
  if (dropped > 0) {
    obs::LogLimited(obs::LogLevel::kInfo,
                    "regions of shared memory dropped: their objects were removed",
                    {{"client", obs::LogText(owner)}, {"regions", dropped}});
  }
  if (regions->second.empty()) regions_.erase(regions);
}

void Regions::Unregister(const std::string& owner, const std::string& name) {
  MutexLock lock(&mu_);
  const auto regions = regions_.find(owner);
  if (regions == regions_.end()) return;
  if (!name.empty()) regions->second.erase(name);
  if (name.empty() || regions->second.empty()) regions_.erase(regions);
}

absl::StatusOr<std::vector<Region>> Regions::List(const std::string& owner,
                                                  const std::string& name) {
  std::vector<Region> out;
  MutexLock lock(&mu_);
  DropGone(owner);
  if (const auto regions = regions_.find(owner); regions != regions_.end()) {
    for (const auto& [known, region] : regions->second) {
      if (name.empty() || name == known) out.push_back(region);
    }
  }
  if (!name.empty() && out.empty()) return NoRegion(name);
  return out;
}

size_t Regions::size() const {
  MutexLock lock(&mu_);
  size_t sum = 0;
  for (const auto& [owner, regions] : regions_) sum += regions.size();
  return sum;
}

absl::Status Regions::NoRegion(absl::string_view name) {
  return wire::WithField(
      absl::NotFoundError(absl::StrCat("name: no region \"", obs::LogText(name, kMaxNameBytes),
                                       "\" is registered")),
      "name");
}

absl::Status Regions::Resolve(const std::string& owner, absl::string_view field,
                              v1::SharedMemory* range) const {
  MutexLock lock(&mu_);
  static const ByName kNone;
  const auto regions = regions_.find(owner);
  const ByName& known = regions == regions_.end() ? kNone : regions->second;
  const auto it = known.find(range->name());
  if (it == known.end()) {
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

}  // namespace awqd::services::oip
