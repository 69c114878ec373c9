// HttpCaller: what somebody shows who asks over HTTP, where there are no certificates.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "server/security/access.h"

namespace awqd {

class HttpCaller final : public security::Credentials {
 public:
  // Values of the header "Authorization", which outlive it.
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
