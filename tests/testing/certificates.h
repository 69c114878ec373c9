// Certificates for tests: authorities and the certificates that they sign, created anew each time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace awqd {

// Both in PEM.
struct CertifiedKey {
  std::string certificate;
  std::string key;
};

struct CertificateSubject {
  std::string common_name;
  // In OpenSSL's form: "DNS:localhost,IP:127.0.0.1,URI:spiffe://a/b,email:a@example.org".
  std::string alternative_names = "";
  // From now, in seconds; below 0 is the past.
  int64_t valid_from_s = -3600;
  int64_t valid_until_s = 3600;
};

class CertificateAuthority {
 public:
  explicit CertificateAuthority(const std::string& name);
  ~CertificateAuthority();

  const std::string& certificate() const { return certificate_; }
  // A new P-256 key and its certificate. Throws if OpenSSL fails.
  CertifiedKey Issue(const CertificateSubject& subject) const;

 private:
  struct Own;
  std::unique_ptr<Own> own_;
  std::string certificate_;
};

}  // namespace awqd
