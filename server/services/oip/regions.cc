// A bounded table.
#include "server/services/oip/regions.h"

#include "absl/status/statusor.h"
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
  const Key key(owner, region.name);
  if (regions_.contains(key)) {
    return wire::WithField(absl::AlreadyExistsError(absl::StrCat(
                               "name: a region \"", obs::LogText(region.name, kMaxNameBytes),
                               "\" is registered already")),
                           "name");
  }
  size_t& count = counts_[owner];
  if (count >= kMaxRegions) {
    return absl::ResourceExhaustedError(absl::StrCat("regions: got one more than ", kMaxRegions,
                                                     ", which is the most; unregister some"));
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

}  // namespace awqd::services::oip
