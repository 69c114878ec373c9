// Parses and prints lists of roles.
#include "server/security/roles.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "server/security/identities.h"

namespace awqd::security {
namespace {

constexpr std::array<absl::string_view, kRoles> kNames = {"infer", "read", "admin", "metrics",
                                                          "attach"};

}  // namespace

absl::string_view Name(Role role) { return kNames[static_cast<size_t>(role)]; }

absl::StatusOr<Roles> ParseRoles(absl::string_view text) {
  Roles roles;
  for (const absl::string_view word : absl::StrSplit(text, ',')) {
    int found = kRoles;
    for (int i = 0; i < kRoles; ++i) {
      if (kNames[i] == word) found = i;
    }
    if (found == kRoles) {
      return BadValue("roles", QuoteIfShort(word),
                      "a list of infer, read, admin, metrics and attach");
    }
    roles.Insert(static_cast<Role>(found));
  }
  return roles;
}

std::string ToString(Roles roles) {
  std::string out;
  for (int i = 0; i < kRoles; ++i) {
    if (!roles.Has(static_cast<Role>(i))) continue;
    absl::StrAppend(&out, out.empty() ? "" : ",", kNames[i]);
  }
  return out;
}

}  // namespace awqd::security
