// The flags of certificates, tokens, and what one client may take.
#include "server/config/flag_table.h"

namespace awqd {
namespace {

using security::ModelControl;

void AddTlsFlags(FlagTable& table, security::Options& security) {
  table.Group("Security");
  table.Add("tls_cert", security.tls_cert,
            "PEM file with the server's certificate, and after it those between it and its CA. "
            "host:port addresses then speak TLS 1.2 or newer and nothing else; unix: addresses "
            "stay plain. This file and the two next are read again within three seconds of a "
            "change, for new connections; one that is no good is reported and not used.");
  table.Add("tls_key", security.tls_key, "PEM file with its private key, without a passphrase.");
  table.Add("tls_client_ca", security.tls_client_ca,
            "PEM file of CAs. Clients must then show a certificate that one of them signed (mTLS); "
            "who they are is for --tokens to say.");
}

void AddIdentityFlags(FlagTable& table, security::Options& security) {
  table.Add("tokens", security.tokens,
            "File of who may call: a line is a name, roles (infer, read, admin, metrics, with "
            "commas) and sha256:DIGEST of a token, as awqctl token prints it, or cert:cn:NAME, "
            "cert:dns:NAME and so on of a client certificate. Calls without one of these, or "
            "without the method's role, are refused. Read again within two seconds of a change.");
  table.Flag("insecure_tokens", security.insecure_tokens,
             "Take tokens without TLS on addresses beyond this machine, where everybody on the way "
             "can read them, for gRPC and for metrics; for servers behind a proxy that does TLS.");
  table.Flag("open_health", security.open_health,
             "Answer grpc.health.v1 without a token, for probes; with --no_open_health it asks for "
             "an identity of any role.");
  table.Choice<ModelControl>("model_control", security.model_control,
                             {{"auto", ModelControl::kAuto},
                              {"any", ModelControl::kAny},
                              {"admin", ModelControl::kAdmin},
                              {"none", ModelControl::kNone}},
                             "Who may load and unload models: any caller, those with the role "
                             "admin, or none. auto: admin with --tokens; without, any where only "
                             "loopback and unix: addresses are listened on, otherwise none.");
}

void AddClientFlags(FlagTable& table, transport::ClientQuota& client) {
  table.Number("max_requests_in_flight_per_client", client.requests_in_flight, int64_t{0},
               int64_t{1} << 32,
               "Requests that one client may have in flight, messages of streams and open streams "
               "among them; one more is refused with RESOURCE_EXHAUSTED and a retry delay. A "
               "client is an identity of --tokens, or without them a machine. 0: no bound.");
  table.Bytes("max_bytes_in_flight_per_client", client.bytes_in_flight, 0, int64_t{1} << 50,
              "As max_in_flight_bytes, of one client. At least both message limits together. 0: no "
              "bound.");
  table.Number("max_requests_per_second_per_client", client.requests_per_second, 0.0, 1e9,
               "Requests that one client may begin in a second, on average; as many may come at "
               "once. 0: no bound.");
}

}  // namespace

void AddSecurityFlags(FlagTable& table, Options& options) {
  transport::Options& transport = options.rpc.transport;
  AddTlsFlags(table, transport.security);
  AddIdentityFlags(table, transport.security);
  AddClientFlags(table, transport.client);
}

}  // namespace awqd
