// Identifies a caller by its credentials, and checks its roles.
#include "server/security/access.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::security {

Access::Access(const Options& options)
    : options_(options), identities_(std::make_shared<Identities>()) {}

absl::StatusOr<std::unique_ptr<Access>> Access::Create(const Options& options) {
  auto access = std::make_unique<Access>(options);
  if (!options.identities()) return access;
  AWQD_ASSIGN_OR_RETURN(
      access->watch_,
      WatchedFiles::Start({options.tokens},
                          [self = access.get()](const WatchedFiles::Contents& contents) {
                            return self->ReplaceIdentities(contents[0]);
                          }));
  return access;
}

absl::Status Access::ReplaceIdentities(absl::string_view text) {
  absl::StatusOr<Identities> read = Identities::Parse(text);
  if (!read.ok()) {
    return Prefixed(absl::StrCat("--tokens: \"", obs::LogText(options_.tokens, 1024), "\""),
                    read.status());
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

std::optional<Role> Access::RequiredRole(Need need) const {
  switch (need) {
    case Need::kInfer:
      return Role::kInfer;
    case Need::kRead:
      return Role::kRead;
    case Need::kMetrics:
      return Role::kMetrics;
    case Need::kAttach:
      return Role::kAttach;
    case Need::kAdmin:
      return Role::kAdmin;
    case Need::kModelControl:
      if (options_.model_control == ModelControl::kAny) return std::nullopt;
      return Role::kAdmin;
    case Need::kIdentity:
    case Need::kHealth:
      break;
  }
  return std::nullopt;
}

absl::StatusOr<IdentityPtr> Access::Identify(absl::string_view method, Need need,
                                             const Credentials& caller) const {
  constexpr absl::string_view kBearer = "Bearer ";
  const std::shared_ptr<const Identities> known = identities();
  const std::optional<Role> role = RequiredRole(need);
  const auto nobody = [&](absl::string_view got) {
    return absl::UnauthenticatedError(absl::StrCat(
        method, ": got ", got, ", expected a token (metadata \"authorization: Bearer TOKEN\")",
        known->has_certificates() ? " or a client certificate" : "",
        role ? absl::StrCat(" of an identity with the role ", Name(*role)) : ""));
  };
  // A token takes precedence over a certificate, because it belongs to the call itself.
  if (!caller.authorizations.empty()) {
    if (caller.authorizations.size() > 1) return nobody("several values of \"authorization\"");
    absl::string_view token = caller.authorizations.front();
    if (!absl::StartsWithIgnoreCase(token, kBearer) || token.size() == kBearer.size()) {
      return nobody("an \"authorization\" that is not a Bearer token");
    }
    IdentityPtr identity = known->FindToken(token.substr(kBearer.size()));
    if (identity == nullptr) return nobody("an unknown token");
    return identity;
  }
  if (!known->has_certificates()) return nobody("none");
  for (const std::string& name : caller.certificate_names) {
    if (IdentityPtr identity = known->FindCertificate(name)) return identity;
  }
  return nobody(caller.certificate_names.empty() ? "none" : "a certificate with unknown names");
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
  const std::optional<Role> role = RequiredRole(need);
  if (identity == nullptr || !role || identity->roles.Has(*role)) return identity;
  return absl::PermissionDeniedError(absl::StrCat(method, ": needs the role ", Name(*role), "; \"",
                                                  identity->name, "\" has ",
                                                  ToString(identity->roles)));
}

}  // namespace awqd::security
