// Bounds and words.
#include "client/awqctl/flag_values.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace awqd::awqctl {

CLI::Validator NumberFrom(double min, double max) {
  const auto check = [min, max](const std::string& text) -> std::string {
    double value = 0;
    if (absl::SimpleAtod(text, &value) && value >= min && value <= max) return "";
    return absl::StrCat("got '", text, "', expected a number from ", min, " to ", max);
  };
  return CLI::Validator(check, absl::StrCat("FLOAT in [", min, " - ", max, "]"));
}

CLI::Option* AddDType(CLI::App* app, const std::string& flag, v1::DType& target,
                      const std::string& help) {
  const Words<v1::DType> words = {{"fp16", v1::FP16}, {"bf16", v1::BF16}, {"fp32", v1::FP32}};
  return AddWord(app, flag, target, words, help)->type_name("DTYPE");
}

CLI::Option* AddPath(CLI::App* app, v1::Path& target) {
  const Words<v1::Path> words = {
      {"auto", v1::AUTO}, {"fused", v1::FUSED}, {"dequantize", v1::DEQUANTIZE}};
  return AddWord(app, "--path", target, words,
                 "How to compute: auto (default), fused or dequantize")
      ->type_name("PATH");
}

CLI::Option* AddActivationFunction(CLI::App* app, v1::ActivationFunction& target) {
  const Words<v1::ActivationFunction> words = {
      {"none", v1::NONE}, {"relu", v1::RELU}, {"gelu", v1::GELU}, {"silu", v1::SILU}};
  return AddWord(
             app, "--activation_function", target, words,
             "Function of the product and its bias: none (default), relu, gelu (by erf) or silu")
      ->type_name("FUNCTION");
}

CLI::Option* AddQuantization(CLI::App* app, v1::ActivationQuantization& target) {
  const Words<v1::ActivationQuantization> words = {{"none", v1::ACTIVATIONS_AS_SENT},
                                                   {"per_token", v1::INT8_PER_TOKEN},
                                                   {"static", v1::INT8_STATIC},
                                                   {"declared", v1::INT8_AS_DECLARED},
                                                   {"never", v1::ACTIVATIONS_FLOATING}};
  return AddWord(
             app, "--quantize_activations", target, words,
             "Round activations to INT8 in the server: none (default), per_token (a "
             "scale for each token), static (by --activation_scale), declared (as the checkpoint "
             "says) or never (not by the server's --int8_activations either)")
      ->type_name("HOW");
}

void AddSecurityFlags(CLI::App* app, client::Security& security) {
  // Not the names of the server's own files, which the same environment may hold.
  app->add_option("--tls_ca", security.tls_ca,
                  "PEM file of the CAs that may have signed the server's certificate; "
                  "connections to host:port then speak TLS")
      ->envname("AWQD_TLS_CA");
  app->add_option("--tls_cert", security.tls_cert,
                  "PEM file with a certificate of this client, for servers that ask for one")
      ->envname("AWQD_CLIENT_CERT");
  app->add_option("--tls_key", security.tls_key, "PEM file with its key")
      ->envname("AWQD_CLIENT_KEY");
  app->add_option("--token_file", security.token_file, "File with the token that every call shows")
      ->envname("AWQD_TOKEN_FILE");
  app->add_flag("--insecure_token", security.insecure_token,
                "Send the token without TLS beyond this machine, where everybody on the way can "
                "read it");
}

}  // namespace awqd::awqctl
