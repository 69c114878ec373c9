// The options' checks against each other, their defaults, and the warning of an exposed server.
#include "server/security/options.h"

#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::security {
namespace {

using ::testing::HasSubstr;

Options With(bool tls, bool tokens) {
  Options options;
  if (tls) options.tls_cert = options.tls_key = "x";
  if (tokens) options.tokens = "y";
  return options;
}

ModelControl Resolved(Options options, bool local) {
  EXPECT_TRUE(ResolveOptions(&options, local).ok());
  return options.model_control;
}

TEST(ResolveOptions, WhoMayLoadModelsByDefault) {
  EXPECT_EQ(Resolved(With(false, false), true), ModelControl::kAny);
  EXPECT_EQ(Resolved(With(false, false), false), ModelControl::kNone);
  EXPECT_EQ(Resolved(With(true, false), false), ModelControl::kNone);
  EXPECT_EQ(Resolved(With(true, true), false), ModelControl::kAdmin);
  EXPECT_EQ(Resolved(With(false, true), true), ModelControl::kAdmin);
}

TEST(ResolveOptions, KeepsWhatWasAskedFor) {
  for (const ModelControl control : {ModelControl::kAny, ModelControl::kNone}) {
    Options options = With(true, true);
    options.model_control = control;
    EXPECT_EQ(Resolved(options, false), control);
    options = With(false, false);
    options.model_control = control;
    EXPECT_EQ(Resolved(options, false), control);
  }
}

TEST(ResolveOptions, RefusesWhatDoesNotFit) {
  const auto refusal = [](Options options, bool local) {
    const absl::Status status = ResolveOptions(&options, local);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  Options options = With(true, false);
  options.tls_key = "";
  EXPECT_THAT(refusal(options, true), HasSubstr("--tls_key: got nothing"));
  options = With(true, false);
  options.tls_cert = "";
  EXPECT_THAT(refusal(options, true), HasSubstr("--tls_cert: got nothing"));
  options = With(false, false);
  options.tls_client_ca = "ca";
  EXPECT_THAT(refusal(options, true), HasSubstr("--tls_client_ca"));
  options = With(false, false);
  options.model_control = ModelControl::kAdmin;
  EXPECT_THAT(refusal(options, true), HasSubstr("--model_control: got admin without --tokens"));
}

TEST(ResolveOptions, TokensBeyondThisMachineWantTls) {
  Options plain = With(false, true);
  EXPECT_THAT(std::string(ResolveOptions(&plain, false).message()), HasSubstr("--insecure_tokens"));
  EXPECT_TRUE(ResolveOptions(&plain, true).ok());
  plain = With(false, true);
  plain.insecure_tokens = true;
  EXPECT_TRUE(ResolveOptions(&plain, false).ok());
  Options tls = With(true, true);
  EXPECT_TRUE(ResolveOptions(&tls, false).ok());
}

TEST(CheckMetrics, TokensForMetricsDoNotTravelInTheClear) {
  Options options = With(false, true);
  EXPECT_TRUE(CheckMetrics(options, true).ok());
  EXPECT_THAT(std::string(CheckMetrics(options, false).message()),
              AllOf(HasSubstr("--metrics_address: got"), HasSubstr("--insecure_tokens")));
  options.insecure_tokens = true;
  EXPECT_TRUE(CheckMetrics(options, false).ok());
  EXPECT_TRUE(CheckMetrics(With(false, false), false).ok()) << "nobody has a token";
  EXPECT_TRUE(CheckMetrics(With(true, true), false).ok());
}

TEST(ExposureWarning, SaysWhatIsMissing) {
  EXPECT_EQ(ExposureWarning(With(false, false), true), "");
  EXPECT_EQ(ExposureWarning(With(true, true), false), "");
  EXPECT_EQ(ExposureWarning(With(false, false), false),
            "listening beyond this machine without encryption (--tls_cert) and authentication "
            "(--tokens or --tls_client_ca)");
  EXPECT_EQ(ExposureWarning(With(false, true), false),
            "listening beyond this machine without encryption (--tls_cert)");
  Options options = With(true, false);
  EXPECT_THAT(ExposureWarning(options, false), HasSubstr("without authentication"));
  options.tls_client_ca = "ca";
  EXPECT_EQ(ExposureWarning(options, false), "");
}

}  // namespace
}  // namespace awqd::security
