// awqd_echo: EchoService behind a gRPC server with awqd's own bounds and timers.
//   awqd_echo --address 127.0.0.1:0 --port_file FILE --weight PATH=KxN ... [-- FLAGS OF awqd]
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/config/options.h"
#include "server/transport/grpc_server.h"
#include "tests/bench/echo.h"

namespace awqd::bench {
namespace {

constexpr char kUsage[] =
    "usage: awqd_echo --address HOST:PORT --port_file FILE --weight PATH=KxN ... [-- AWQD FLAGS]\n";

struct Arguments {
  std::string address = "127.0.0.1:0";
  std::string port_file;
  EchoShapes shapes;
  // Parses awqd's own flags, so that both servers start with the same; the repository is not used.
  std::vector<const char*> awqd = {"awqd", "--model_repository=/"};
};

bool ParseWeight(const std::string& text, EchoShapes& shapes) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
  const std::vector<std::string> sizes = absl::StrSplit(parts.second, 'x');
  EchoShape shape;
  if (parts.first.empty() || sizes.size() != 2 || !absl::SimpleAtoi(sizes[0], &shape.k) ||
      !absl::SimpleAtoi(sizes[1], &shape.n) || shape.k < 1 || shape.n < 1) {
    return false;
  }
  shapes[parts.first] = shape;
  return true;
}

bool ParseArguments(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--") {
      arguments.awqd.insert(arguments.awqd.end(), argv + i + 1, argv + argc);
      break;
    }
    if (++i == argc) return false;
    if (flag == "--address") {
      arguments.address = argv[i];
    } else if (flag == "--port_file") {
      arguments.port_file = argv[i];
    } else if (flag != "--weight" || !ParseWeight(argv[i], arguments.shapes)) {
      std::cerr << "awqd_echo: got " << flag << " " << argv[i] << "\n";
      return false;
    }
  }
  return !arguments.shapes.empty();
}

int Serve(const Arguments& arguments) {
  const absl::StatusOr<CommandLine> line =
      ParseCommandLine(static_cast<int>(arguments.awqd.size()), arguments.awqd.data());
  if (!line.ok()) {
    std::cerr << "awqd_echo: " << line.status().message() << "\n";
    return 2;
  }
  const transport::Options& options = line->options.rpc.transport;
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // as awqd does
  EchoService service(arguments.shapes, options.max_send_message_bytes);
  EchoRepository repository(arguments.shapes);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(arguments.address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  builder.RegisterService(&repository);
  transport::ApplyOptions(options, &builder);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    std::cerr << "awqd_echo: cannot listen on " << arguments.address << "\n";
    return 1;
  }
  if (!arguments.port_file.empty()) std::ofstream(arguments.port_file) << port << "\n";
  server->Wait();
  return 0;
}

}  // namespace
}  // namespace awqd::bench

int main(int argc, char** argv) {
  awqd::bench::Arguments arguments;
  if (!awqd::bench::ParseArguments(argc, argv, arguments)) {
    std::cerr << awqd::bench::kUsage;
    return 2;
  }
  return awqd::bench::Serve(arguments);
}
