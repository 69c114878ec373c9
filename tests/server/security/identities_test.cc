// The file of identities: its grammar, and that errors never quote a secret.
#include "server/security/identities.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::security {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string DigestOf(absl::string_view token) {
  const Digest digest = Sha256(token);
  return absl::StrCat("sha256:",
                      absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), 32}));
}

TEST(Identities, AreFoundByTokenAndByCertificate) {
  const auto read = Identities::Parse(absl::StrCat(
      "# who may call\n\nalice  infer,read\t", DigestOf("secret"), "\r\n", "  alice admin ",
      DigestOf("other"), "\nprobe@x metrics cert:dns:probe.example.org"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->size(), 3u);
  EXPECT_TRUE(read->has_certificates());
  const IdentityPtr alice = read->FindToken("secret");
  ASSERT_NE(alice, nullptr);
  EXPECT_EQ(alice->name, "alice");
  EXPECT_EQ(ToString(alice->roles), "infer,read");
  ASSERT_NE(read->FindToken("other"), nullptr);
  EXPECT_EQ(ToString(read->FindToken("other")->roles), "admin");
  for (const char* token : {"", "secre", "secret ", "SECRET"}) {
    EXPECT_EQ(read->FindToken(token), nullptr) << token;
  }
  ASSERT_NE(read->FindCertificate("dns:probe.example.org"), nullptr);
  EXPECT_EQ(read->FindCertificate("dns:probe.example.org")->name, "probe@x");
  for (const char* name : {"cn:probe.example.org", "probe.example.org", "dns:Probe.example.org",
                           "dns:a.probe.example.org", ""}) {
    EXPECT_EQ(read->FindCertificate(name), nullptr) << name;
  }
}

TEST(Identities, NobodyIsKnownToAnEmptyFile) {
  const auto read = Identities::Parse("# nobody\n\n");
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->size(), 0u);
  EXPECT_EQ(read->FindToken(""), nullptr);
  EXPECT_FALSE(read->has_certificates());
}

TEST(Identities, ABadLineIsNamedAndWhatItHoldsIsNotRepeated) {
  const std::string good = absl::StrCat("alice infer ", DigestOf("secret"));
  struct Case {
    std::string line, says;
  };
  const Case cases[] = {
      {"alice infer", "got 2 words, expected 3"},
      {"alice infer read " + DigestOf("x"), "got 4 words"},
      {"al/ice infer " + DigestOf("x"), "name: got \"al/ice\""},
      {std::string(65, 'a') + " infer " + DigestOf("x"), "at most 64 letters"},
      {"bob root " + DigestOf("x"), "roles: got \"root\", expected a list of infer, read, admin"},
      {"bob infer, " + DigestOf("x"), "roles: got \"\""},
      {"bob infer hunter2", "expected sha256:DIGEST or cert:cn:NAME"},
      {"bob infe\xdc\xdc\xdc\xdc\xdcr x", "roles: got something of 10 characters"},
      {"bob infer sha256:hunter2", "something of 7 characters, expected 64 hexadecimal digits"},
      {"bob infer cert:hunter2", "cert:cn:NAME"},
      // A token in the wrong place.
      {"bob AAECAwQFBgcICQoLDA0Ohunter2 " + DigestOf("x"), "roles: got something of 27 characters"},
      {"AAECAwQFBgcICQoLDA0/hunter2 infer " + DigestOf("x"),
       "name: got something of 27 characters"},
      {"bob infer cert:cn:", "cert:cn:NAME"},
      {"bob read " + DigestOf("secret"), "that an earlier line has"},
  };
  for (const Case& bad : cases) {
    const absl::Status status = Identities::Parse(absl::StrCat(good, "\n", bad.line)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad.line;
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr("line 2: ")) << bad.line;
    EXPECT_THAT(message, HasSubstr(bad.says)) << bad.line;
    EXPECT_THAT(message, Not(HasSubstr("hunter2")));
  }
}

}  // namespace
}  // namespace awqd::security
