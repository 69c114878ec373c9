// HttpCaller: the credentials of a client over HTTP, who has no certificate.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "server/security/access.h"

namespace awqd {

class HttpCaller final : public security::Credentials {
 public:
  // `authorizations`: values of the header "Authorization"; they must outlive this object.
  explicit HttpCaller(const std::vector<std::string>& authorizations)
      : authorizations_(authorizations) {}
  void Authorizations(absl::FunctionRef<void(absl::string_view)> each) const override {
    for (const std::string& value : authorizations_) each(value);
  }
  void CertificateNames(absl::FunctionRef<void(absl::string_view)>) const override {}

 private:
  const std::vector<std::string>& authorizations_;
};

}  // namespace awqd
