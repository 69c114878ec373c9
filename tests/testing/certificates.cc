// Creates certificates with OpenSSL.
#include "tests/testing/certificates.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <stdexcept>

namespace awqd {
namespace {

template <auto kFree>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, FreeWith<X509_free>>;
using Extension = std::unique_ptr<X509_EXTENSION, FreeWith<X509_EXTENSION_free>>;
using Bio = std::unique_ptr<BIO, FreeWith<BIO_free>>;

void Check(bool done) {
  if (!done) throw std::runtime_error("OpenSSL cannot make a certificate");
}

std::string Text(const Bio& bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

std::string Pem(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  Check(PEM_write_bio_X509(bio.get(), certificate) == 1);
  return Text(bio);
}

std::string Pem(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_mem()));
  Check(PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return Text(bio);
}

void Extend(X509* certificate, int kind, const std::string& value) {
  const Extension extension(X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
  Check(extension != nullptr && X509_add_ext(certificate, extension.get(), -1) == 1);
}

// A certificate without issuer and signature.
Certificate Draft(const CertificateSubject& subject, EVP_PKEY* key) {
  Certificate out(X509_new());
  Check(out != nullptr && X509_set_version(out.get(), 2) == 1);
  uint64_t serial = 0;
  Check(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial)) == 1);
  Check(ASN1_INTEGER_set_uint64(X509_get_serialNumber(out.get()), serial >> 1) == 1);
  X509_gmtime_adj(X509_getm_notBefore(out.get()), subject.valid_from_s);
  X509_gmtime_adj(X509_getm_notAfter(out.get()), subject.valid_until_s);
  const auto* name = reinterpret_cast<const unsigned char*>(subject.common_name.c_str());
  Check(X509_NAME_add_entry_by_txt(X509_get_subject_name(out.get()), "CN", MBSTRING_UTF8, name, -1,
                                   -1, 0) == 1);
  Check(X509_set_pubkey(out.get(), key) == 1);
  return out;
}

}  // namespace

struct CertificateAuthority::Own {
  ~Own() {
    X509_free(certificate);
    EVP_PKEY_free(key);
  }
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = nullptr;
};

CertificateAuthority::CertificateAuthority(const std::string& name)
    : own_(std::make_unique<Own>()) {
  Check(own_->key != nullptr);
  X509* const own = own_->certificate =
      Draft({.common_name = name, .valid_until_s = 86400}, own_->key).release();
  Extend(own, NID_basic_constraints, "critical,CA:TRUE");
  Check(X509_set_issuer_name(own, X509_get_subject_name(own)) == 1);
  Check(X509_sign(own, own_->key, EVP_sha256()) != 0);
  certificate_ = Pem(own);
}

CertificateAuthority::~CertificateAuthority() = default;

CertifiedKey CertificateAuthority::Issue(const CertificateSubject& subject) const {
  const Key key(EVP_EC_gen("P-256"));
  Check(key != nullptr);
  const Certificate out = Draft(subject, key.get());
  if (!subject.alternative_names.empty()) {
    Extend(out.get(), NID_subject_alt_name, subject.alternative_names);
  }
  Check(X509_set_issuer_name(out.get(), X509_get_subject_name(own_->certificate)) == 1);
  Check(X509_sign(out.get(), own_->key, EVP_sha256()) != 0);
  return {Pem(out.get()), Pem(key.get())};
}

}  // namespace awqd
