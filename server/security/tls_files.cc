// Checks PEM files with OpenSSL.
#include "server/security/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::security {
namespace {

template <auto kFree>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, FreeWith<BIO_free>>;
using Certificate = std::unique_ptr<X509, FreeWith<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Without this callback OpenSSL asks the terminal for the passphrase of an encrypted key.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::Status Refused(absl::string_view flag, const std::string& path, absl::string_view expected) {
  ERR_clear_error();
  return BadValue(flag, absl::StrCat("\"", obs::LogText(path, 1024), "\""), expected);
}

Certificate FirstCertificate(const std::string& pem) {
  const Bio bio = Open(pem);
  return Certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr));
}

absl::Time ExpiryOf(const X509* certificate) {
  std::tm end = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &end) != 1) return absl::InfinitePast();
  return absl::FromTM(end, absl::UTCTimeZone());
}

// The earliest expiry of the certificates in `pem`. Null when it has none, or a block that fails to
// parse.
std::optional<absl::Time> EarliestExpiry(const std::string& pem) {
  const Bio bio = Open(pem);
  std::optional<absl::Time> earliest;
  while (const auto certificate =
             Certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr))) {
    earliest = std::min(earliest.value_or(absl::InfiniteFuture()), ExpiryOf(certificate.get()));
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return at_end ? earliest : std::nullopt;
}

}  // namespace

std::vector<std::string> TlsPaths(const Options& options) {
  std::vector<std::string> paths = {options.tls_cert, options.tls_key};
  if (!options.tls_client_ca.empty()) paths.push_back(options.tls_client_ca);
  return paths;
}

absl::StatusOr<TlsFiles> CheckTls(const Options& options,
                                  const std::vector<std::string>& contents) {
  TlsFiles files = {.certificates = contents[0], .key = contents[1]};
  if (contents.size() > 2) files.client_ca = contents[2];
  const std::optional<absl::Time> expiry = EarliestExpiry(files.certificates);
  if (!expiry) return Refused("--tls_cert", options.tls_cert, "certificates in PEM");
  files.expiry = *expiry;
  const Bio bio = Open(files.key);
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return Refused("--tls_key", options.tls_key, "a private key in PEM, without a passphrase");
  }
  if (X509_check_private_key(FirstCertificate(files.certificates).get(), key.get()) != 1) {
    return Refused("--tls_key", options.tls_key,
                   absl::StrCat("the key of the first certificate in \"",
                                obs::LogText(options.tls_cert, 1024), "\""));
  }
  if (!options.tls_client_ca.empty() && !EarliestExpiry(files.client_ca)) {
    return Refused("--tls_client_ca", options.tls_client_ca, "certificates in PEM");
  }
  return files;
}

}  // namespace awqd::security
