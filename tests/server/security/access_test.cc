// Identification and roles: every kind of caller at every kind of method.
#include "server/security/access.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::security {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Credentials Token(const std::string& token) { return {.authorizations = {"Bearer " + token}}; }

Credentials Certificate(std::vector<std::string> names) {
  return {.certificate_names = std::move(names)};
}

std::string Line(const std::string& name, const std::string& roles, const std::string& token) {
  const Digest digest = Sha256(token);
  return absl::StrCat(
      name, " ", roles,
      " sha256:", absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), 32}), "\n");
}

constexpr Need kNeeds[] = {Need::kInfer, Need::kRead,         Need::kMetrics,  Need::kAttach,
                           Need::kAdmin, Need::kModelControl, Need::kIdentity, Need::kHealth};

class AccessTest : public ::testing::Test {
 protected:
  AccessTest() {
    options_.tokens = testing::TempDir() + "/awqd_access_" + std::to_string(getpid());
    options_.model_control = ModelControl::kAdmin;
    Write(absl::StrCat(Line("ian", "infer", "i-token"), Line("rita", "read", "r-token"),
                       Line("ada", "admin", "a-token"), Line("mia", "metrics", "m-token"),
                       Line("bo", "attach", "b-token"),
                       "carl infer cert:cn:carl\numa read cert:uri:spiffe://x/uma\n"));
  }
  ~AccessTest() override { std::filesystem::remove(options_.tokens); }
  void Write(const std::string& text) const {
    std::ofstream(options_.tokens + ".new") << text;
    std::filesystem::rename(options_.tokens + ".new", options_.tokens);
  }
  void Start() {
    auto access = Access::Create(options_);
    ASSERT_TRUE(access.ok()) << access.status();
    access_ = *std::move(access);
  }
  absl::StatusCode Code(Need need, const Credentials& shown) const {
    return access_->Admit("p.S/M", need, shown).status().code();
  }
  std::string Message(Need need, const Credentials& shown) const {
    return std::string(access_->Admit("p.S/M", need, shown).status().message());
  }

  Options options_;
  std::unique_ptr<Access> access_;
};

TEST_F(AccessTest, ARoleOpensItsMethodsAndNoOthers) {
  Start();
  const std::map<std::string, std::vector<Need>> open = {
      {"i-token", {Need::kInfer}},
      {"r-token", {Need::kRead}},
      {"a-token", {Need::kAdmin, Need::kModelControl}},
      {"m-token", {Need::kMetrics}},
      {"b-token", {Need::kAttach}}};
  for (const auto& [token, needs] : open) {
    for (const Need need : kNeeds) {
      const bool any = need == Need::kIdentity || need == Need::kHealth;
      const bool may = any || std::find(needs.begin(), needs.end(), need) != needs.end();
      EXPECT_EQ(Code(need, Token(token)),
                may ? absl::StatusCode::kOk : absl::StatusCode::kPermissionDenied)
          << token << " " << static_cast<int>(need);
    }
  }
}

TEST_F(AccessTest, NobodyGetsInWithoutBeingKnown) {
  Start();
  Credentials two = Token("i-token");
  two.authorizations.push_back("Bearer r-token");
  const Credentials basic = {.authorizations = {"Basic aTppLXRva2Vu"}};
  const Credentials empty = {.authorizations = {""}};
  const std::pair<Credentials, std::string> strangers[] = {
      {Credentials(), "got none"},
      {Token("hunter2"), "got an unknown token"},
      {Token(""), "not a Bearer token"},
      {Token("i-token "), "an unknown token"},
      {Token(" i-token"), "an unknown token"},
      {two, "several values"},
      {basic, "not a Bearer token"},
      {empty, "not a Bearer token"},
      {Certificate({"cn:carla", "dns:carl"}), "a certificate with unknown names"}};
  for (const auto& [shown, says] : strangers) {
    for (const Need need : kNeeds) {
      if (need == Need::kHealth) continue;
      EXPECT_EQ(Code(need, shown), absl::StatusCode::kUnauthenticated) << says;
      EXPECT_THAT(Message(need, shown), HasSubstr("p.S/M: got "));
      EXPECT_THAT(Message(need, shown), HasSubstr(says));
      EXPECT_THAT(Message(need, shown), Not(HasSubstr("hunter2")));
    }
    EXPECT_EQ(Code(Need::kHealth, shown), absl::StatusCode::kOk);
  }
}

TEST_F(AccessTest, MessagesNameTheRole) {
  Start();
  EXPECT_THAT(Message(Need::kInfer, Credentials()), HasSubstr("an identity with the role infer"));
  EXPECT_THAT(Message(Need::kModelControl, Credentials()), HasSubstr("with the role admin"));
  EXPECT_THAT(Message(Need::kIdentity, Credentials()), Not(HasSubstr("role")));
  EXPECT_EQ(Message(Need::kModelControl, Token("i-token")),
            "p.S/M: needs the role admin; \"ian\" has infer");
  EXPECT_EQ(Message(Need::kInfer, Token("a-token")),
            "p.S/M: needs the role infer; \"ada\" has admin");
}

TEST_F(AccessTest, ACertificateIsAnIdentityToo) {
  Start();
  EXPECT_EQ((*access_->Admit("p.S/M", Need::kInfer, Certificate({"cn:carl"})))->name, "carl");
  EXPECT_EQ(
      (*access_->Admit("p.S/M", Need::kRead, Certificate({"cn:else", "uri:spiffe://x/uma"})))->name,
      "uma");
  EXPECT_EQ(Code(Need::kRead, Certificate({"cn:carl"})), absl::StatusCode::kPermissionDenied);
  Credentials both = Token("r-token");
  both.certificate_names = {"cn:carl"};
  EXPECT_EQ((*access_->Admit("p.S/M", Need::kRead, both))->name, "rita") << "the token decides";
  both.authorizations = {"Bearer wrong"};
  EXPECT_EQ(Code(Need::kInfer, both), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessTest, TheSchemeIsWrittenInEitherCase) {
  Start();
  EXPECT_EQ(Code(Need::kInfer, {.authorizations = {"bearer i-token"}}), absl::StatusCode::kOk);
}

TEST_F(AccessTest, HealthMayBeClosed) {
  options_.open_health = false;
  Start();
  EXPECT_EQ(Code(Need::kHealth, Credentials()), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Code(Need::kHealth, Token("m-token")), absl::StatusCode::kOk);
}

TEST_F(AccessTest, ModelControl) {
  options_.model_control = ModelControl::kNone;
  Start();
  EXPECT_EQ(Code(Need::kModelControl, Token("a-token")), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Message(Need::kModelControl, Token("a-token")),
            "p.S/M: switched off (--model_control=none)");
  EXPECT_EQ(Code(Need::kModelControl, Token("wrong")), absl::StatusCode::kUnauthenticated);
  options_.model_control = ModelControl::kAny;
  Start();
  EXPECT_EQ(Code(Need::kModelControl, Token("i-token")), absl::StatusCode::kOk);
  EXPECT_EQ(Code(Need::kModelControl, Credentials()), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessTest, WithoutIdentitiesAllIsOpenButModelControl) {
  Options options;
  for (const ModelControl control : {ModelControl::kAny, ModelControl::kNone}) {
    options.model_control = control;
    access_ = std::make_unique<Access>(options);
    for (const Need need : kNeeds) {
      const bool denied = need == Need::kModelControl && control == ModelControl::kNone;
      EXPECT_EQ(Code(need, Credentials()),
                denied ? absl::StatusCode::kPermissionDenied : absl::StatusCode::kOk);
    }
    EXPECT_EQ(*access_->Admit("p.S/M", Need::kInfer, Token("any")), nullptr);
  }
}

TEST_F(AccessTest, TheFileIsReadAgain) {
  Start();
  Write(Line("ian", "infer", "new-token"));
  for (const absl::Time until = absl::Now() + absl::Seconds(10); absl::Now() < until;) {
    if (Code(Need::kInfer, Token("new-token")) == absl::StatusCode::kOk) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(Code(Need::kInfer, Token("new-token")), absl::StatusCode::kOk);
  EXPECT_EQ(Code(Need::kInfer, Token("i-token")), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessTest, ABadFileFailsTheStartWithItsName) {
  Write("ian infer hunter2\n");
  const absl::Status status = Access::Create(options_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(options_.tokens));
  EXPECT_THAT(std::string(status.message()), HasSubstr("line 1: "));
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("hunter2")));
  options_.tokens += ".absent";
  EXPECT_THAT(std::string(Access::Create(options_).status().message()),
              HasSubstr(options_.tokens + "\""));
}

}  // namespace
}  // namespace awqd::security
