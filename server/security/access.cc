// From what a caller shows to an identity, and from its roles to yes or no.
#include "server/security/access.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

constexpr absl::string_view kBearer = "Bearer ";

// What came as "authorization".
struct Shown {
  int count = 0;
  std::string token;  // of "Bearer TOKEN"; empty when it is anything else
};

Shown Read(const Credentials& caller) {
  Shown shown;
  caller.Authorizations([&](absl::string_view value) {
    ++shown.count;
    if (!absl::StartsWithIgnoreCase(value, kBearer)) return;
    shown.token = std::string(value.substr(kBearer.size()));
  });
  return shown;
}

}  // namespace

Access::Access(const Options& options)
    : options_(options), identities_(std::make_shared<Identities>()) {}

absl::StatusOr<std::unique_ptr<Access>> Access::Create(const Options& options) {
  auto access = std::make_unique<Access>(options);
  if (!options.identities()) return access;
  AWQD_ASSIGN_OR_RETURN(
      access->watch_,
      WatchedFiles::Start({options.tokens},
                          [self = access.get()](const WatchedFiles::Contents& contents) {
                            return self->Take(contents[0]);
                          }));
  return access;
}

absl::Status Access::Take(absl::string_view text) {
  absl::StatusOr<Identities> read = Identities::Parse(text);
  if (!read.ok()) {
    return absl::Status(read.status().code(),
                        absl::StrCat("--tokens: \"", obs::LogText(options_.tokens, 1024),
                                     "\": ", read.status().message()));
  }
  auto fresh = std::make_shared<const Identities>(*std::move(read));
  MutexLock lock(&mu_);
  identities_ = std::move(fresh);
  return absl::OkStatus();
}

std::shared_ptr<const Identities> Access::identities() const {
  MutexLock lock(&mu_);
  return identities_;
}

absl::string_view Access::RoleOf(Need need) const {
  switch (need) {
    case Need::kInfer:
      return Name(Role::kInfer);
    case Need::kRead:
      return Name(Role::kRead);
    case Need::kMetrics:
      return Name(Role::kMetrics);
    case Need::kAdmin:
      return Name(Role::kAdmin);
    case Need::kModelControl:
      return options_.model_control == ModelControl::kAny ? "" : Name(Role::kAdmin);
    case Need::kIdentity:
    case Need::kHealth:
      break;
  }
  return "";
}

bool Access::Allows(Need need, Roles roles) const {
  switch (need) {
    case Need::kInfer:
      return roles.Has(Role::kInfer);
    case Need::kRead:
      return roles.Has(Role::kRead);
    case Need::kMetrics:
      return roles.Has(Role::kMetrics);
    case Need::kAdmin:
      return roles.Has(Role::kAdmin);
    case Need::kModelControl:
      return options_.model_control == ModelControl::kAny || roles.Has(Role::kAdmin);
    case Need::kIdentity:
    case Need::kHealth:
      return true;
  }
  return false;
}

absl::StatusOr<IdentityPtr> Access::Identify(absl::string_view method, Need need,
                                             const Credentials& caller) const {
  const std::shared_ptr<const Identities> known = identities();
  const absl::string_view role = RoleOf(need);
  const auto nobody = [&](absl::string_view got) {
    return absl::UnauthenticatedError(absl::StrCat(
        method, ": got ", got, ", expected a token (metadata \"authorization: Bearer TOKEN\")",
        known->has_certificates() ? " or a client certificate" : "",
        role.empty() ? "" : absl::StrCat(" of an identity with the role ", role)));
  };
  // A token goes before a certificate: it belongs to the call, not to the connection.
  if (const Shown shown = Read(caller); shown.count > 0) {
    if (shown.count > 1) return nobody("several values of \"authorization\"");
    if (shown.token.empty()) return nobody("an \"authorization\" that is no Bearer token");
    IdentityPtr identity = known->FindToken(shown.token);
    if (identity == nullptr) return nobody("a token that is not known");
    return identity;
  }
  if (!known->has_certificates()) return nobody("none");
  IdentityPtr identity;
  bool any = false;
  caller.CertificateNames([&](absl::string_view name) {
    any = true;
    if (identity == nullptr) identity = known->FindCertificate(name);
  });
  if (identity == nullptr) return nobody(any ? "a certificate whose names are not known" : "none");
  return identity;
}

absl::StatusOr<IdentityPtr> Access::Admit(absl::string_view method, Need need,
                                          const Credentials& caller) const {
  if (need == Need::kHealth && options_.open_health) return nullptr;
  IdentityPtr identity;
  if (options_.identities()) {
    AWQD_ASSIGN_OR_RETURN(identity, Identify(method, need, caller));
  }
  if (need == Need::kModelControl && options_.model_control == ModelControl::kNone) {
    return absl::PermissionDeniedError(
        absl::StrCat(method, ": switched off (--model_control=none)"));
  }
  if (identity == nullptr || Allows(need, identity->roles)) return identity;
  return absl::PermissionDeniedError(absl::StrCat(method, ": needs the role ", RoleOf(need), "; \"",
                                                  identity->name, "\" has ",
                                                  ToString(identity->roles)));
}

}  // namespace awqd::security
