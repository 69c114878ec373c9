// Access: who a caller is, and whether a method is open to it. What is not allowed is denied.
#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "server/security/identities.h"
#include "server/security/options.h"
#include "server/security/roles.h"
#include "server/security/watched_files.h"

namespace awqd::security {

// What a caller shows of itself; asked for only where it matters.
class Credentials {
 public:
  // Calls `each` with every value of "authorization" that came.
  virtual void Authorizations(absl::FunctionRef<void(absl::string_view)> each) const = 0;
  // Calls `each` with every name of the client's certificate, which is verified already, spelled as
  // Identities spell them: "cn:alice". None without a certificate.
  virtual void CertificateNames(absl::FunctionRef<void(absl::string_view)> each) const = 0;

 protected:
  ~Credentials() = default;
};

// Thread-safe.
class Access {
 public:
  // Without identities; of `options`, what is about them is ignored.
  explicit Access(const Options& options);
  // Reads Options::tokens and watches it. `options` are settled. INVALID_ARGUMENT names the file.
  static absl::StatusOr<std::unique_ptr<Access>> Create(const Options& options);

  // Lets a call of `method`, "package.Service/Method", in. Null where no identity was asked for.
  // UNAUTHENTICATED when the caller is nobody that is known, PERMISSION_DENIED when it lacks a
  // role. Neither repeats what the caller has sent.
  absl::StatusOr<IdentityPtr> Admit(absl::string_view method, Need need,
                                    const Credentials& caller) const;

 private:
  absl::StatusOr<IdentityPtr> Identify(absl::string_view method, Need need,
                                       const Credentials& caller) const;
  absl::Status Take(absl::string_view text);
  std::shared_ptr<const Identities> identities() const;
  // The role that `need` stands for, as a word for messages; empty: any.
  bool Allows(Need need, Roles roles) const;
  absl::string_view RoleOf(Need need) const;

  const Options options_;
  mutable Mutex mu_;  // for as long as a pointer is copied
  std::shared_ptr<const Identities> identities_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<WatchedFiles> watch_;
};

}  // namespace awqd::security
