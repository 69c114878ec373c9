// Access: identifies callers, and decides whether they may call a method. The default is no.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "server/security/identities.h"
#include "server/security/options.h"
#include "server/security/roles.h"
#include "server/security/watched_files.h"

namespace awqd::security {

// The credentials of a caller.
struct Credentials {
  std::vector<std::string> authorizations;  // every value of the call's metadata "authorization"
  // Every name of the client's verified certificate, in the form of Identities: "cn:alice".
  std::vector<std::string> certificate_names;
};

// Thread-safe.
class Access {
 public:
  // Knows no identities: options.tokens is ignored.
  explicit Access(const Options& options);
  // Reads options.tokens and watches it. `options` have passed ResolveOptions. INVALID_ARGUMENT
  // names the file.
  static absl::StatusOr<std::unique_ptr<Access>> Create(const Options& options);

  // Whether callers have identities. Otherwise Admit looks at no credentials.
  bool has_identities() const { return options_.identities(); }
  // Admits a call of `method`, "package.Service/Method", and returns the caller's identity, or null
  // where the method needs none. Returns UNAUTHENTICATED for an unknown caller and
  // PERMISSION_DENIED for a missing role. Messages never quote what the caller sent.
  absl::StatusOr<IdentityPtr> Admit(absl::string_view method, Need need,
                                    const Credentials& caller) const;

 private:
  absl::StatusOr<IdentityPtr> Identify(absl::string_view method, Need need,
                                       const Credentials& caller) const;
  absl::Status ReplaceIdentities(absl::string_view text);
  std::shared_ptr<const Identities> identities() const;
  // The role that a caller must have; nullopt: any identity may call.
  std::optional<Role> RequiredRole(Need need) const;

  const Options options_;
  mutable Mutex mu_;  // held while a pointer is copied
  std::shared_ptr<const Identities> identities_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<WatchedFiles> watch_;
};

}  // namespace awqd::security
