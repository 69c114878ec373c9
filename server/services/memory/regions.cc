// A bounded table.
#include "server/services/memory/regions.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

RegionKind KindOf(const Region& region) {
  return region.device_memory == nullptr ? RegionKind::kSystem : RegionKind::kDevice;
}

}  // namespace

absl::Status Regions::Register(const std::string& owner, Region region) {
  if (region.name.empty() || region.name.size() > kMaxNameBytes) {
    return wire::FieldError("name", absl::StrCat(region.name.size(), " bytes"),
                            absl::StrCat("1 to ", kMaxNameBytes));
  }
  Dropped dropped;
  MutexLock lock(&mu_);
  DropGone(owner, &dropped);
  if (!regions_.empty()) {
    auto next = regions_.upper_bound(swept_);
    if (next == regions_.end()) next = regions_.begin();
    swept_ = next->first;
    DropGone(swept_, &dropped);
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

void Regions::Drop(const std::string& owner, absl::FunctionRef<bool(const Region&)> condition,
                   Dropped* dropped) {
  const auto regions = regions_.find(owner);
  if (regions == regions_.end()) return;
  for (auto it = regions->second.begin(); it != regions->second.end();) {
    const auto next = std::next(it);
    if (condition(it->second)) dropped->push_back(regions->second.extract(it));
    it = next;
  }
  if (regions->second.empty()) regions_.erase(regions);
}

void Regions::DropGone(const std::string& owner, Dropped* dropped) {
  const size_t before = dropped->size();
  const auto is_gone = [&](const Region& region) {
    if (KindOf(region) == RegionKind::kDevice) {
      return connected_ != nullptr && !connected_(region.registered_by);
    }
    return region.object.has_value() && memory_->Identify(region.key) != region.object;
  };
  Drop(owner, is_gone, dropped);
  if (dropped->size() == before) return;
  obs::LogLimited(
      obs::LogLevel::kInfo,
      "regions of shared memory dropped: their objects were removed, or their clients are gone",
      {{"client", obs::LogText(owner)}, {"regions", dropped->size() - before}});
}

void Regions::Unregister(const std::string& owner, const std::string& name, RegionKind kind) {
  Dropped dropped;
  MutexLock lock(&mu_);
  const auto is_meant = [&](const Region& region) {
    return KindOf(region) == kind && (name.empty() || region.name == name);
  };
  Drop(owner, is_meant, &dropped);
}

absl::StatusOr<std::vector<Region>> Regions::List(const std::string& owner, const std::string& name,
                                                  RegionKind kind) {
  std::vector<Region> out;
  Dropped dropped;
  MutexLock lock(&mu_);
  DropGone(owner, &dropped);
  if (const auto regions = regions_.find(owner); regions != regions_.end()) {
    for (const auto& [known, region] : regions->second) {
      if (KindOf(region) == kind && (name.empty() || name == known)) out.push_back(region);
    }
  }
  if (!name.empty() && out.empty()) return NoRegion(name);
  return out;
}

obs::SharedDeviceMemoryStats Regions::SweepDevices() {
  obs::SharedDeviceMemoryStats out;
  Dropped dropped;
  MutexLock lock(&mu_);
  std::vector<std::string> owners;
  for (const auto& [owner, regions] : regions_) owners.push_back(owner);
  for (const std::string& owner : owners) DropGone(owner, &dropped);
  for (const auto& [owner, regions] : regions_) {
    for (const auto& [name, region] : regions) {
      if (KindOf(region) != RegionKind::kDevice) continue;
      ++out.regions;
      out.bytes += region.size;
    }
  }
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

absl::StatusOr<Region> Regions::Find(const std::string& owner, const v1::SharedMemory& range,
                                     absl::string_view field) const {
  MutexLock lock(&mu_);
  static const ByName kNone;
  const auto regions = regions_.find(owner);
  const ByName& known = regions == regions_.end() ? kNone : regions->second;
  const auto it = known.find(range.region());
  if (it == known.end()) {
    return wire::FieldError(absl::StrCat(field, ".region"),
                            absl::StrCat("\"", obs::LogText(range.region(), kMaxNameBytes), "\""),
                            "the name of a region that SystemSharedMemoryRegister, "
                            "CudaSharedMemoryRegister or ShareMemory was told");
  }
  const Region& region = it->second;
  const int64_t offset = range.offset(), size = range.size();
  if (offset < 0 || size < 0 || size > region.size || offset > region.size - size) {
    return wire::FieldError(absl::StrCat(field, ".size"),
                            absl::StrCat(size, " from byte ", offset, " on"),
                            absl::StrCat("a range within the region's ", region.size, " bytes"));
  }
  return region;
}

absl::StatusOr<SharedRange> Regions::Open(const std::string& owner, const v1::SharedMemory& range,
                                          SharedMemory::Access access,
                                          absl::string_view field) const {
  if (range.region().empty() || !(memory_->on() || takes_devices_)) {
    return memory_->Open(range, access, field);
  }
  if (!range.name().empty()) {
    return wire::FieldError(absl::StrCat(field, ".region"), "a region beside a name",
                            "one of both");
  }
  AWQD_ASSIGN_OR_RETURN(const Region region, Find(owner, range, field));
  if (region.device_memory != nullptr) {
    return SharedRange(region.device_memory, range.offset(), range.size(), field);
  }
  v1::SharedMemory object;
  object.set_name(region.key);
  object.set_offset(region.offset + range.offset());  // the object has so many bytes
  object.set_size(range.size());
  return memory_->Open(object, access, field);
}

}  // namespace awqd::services
