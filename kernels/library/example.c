// A product by libawqd: ones times a linear of a checkpoint.
//
//   cc example.c $(pkg-config --cflags --libs libawqd) -o example
//   ./example MODEL-FOLDER model.layers.0.mlp.up_proj
#include <awqd.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int code) {
  if (code == AWQD_OK) return;
  fprintf(stderr, "error %d: %s\n", code, awqd_error_message());
  exit(1);
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s MODEL-FOLDER LINEAR\n", argv[0]);
    return 2;
  }
  awqd_device* device;
  awqd_checkpoint* checkpoint;
  awqd_weight* weight;
  check(awqd_device_open("cpu", NULL, &device));
  check(awqd_checkpoint_open(argv[1], &checkpoint));
  check(awqd_weight_load(device, checkpoint, argv[2], &weight));
  awqd_weight_info info = AWQD_INIT(info);
  check(awqd_weight_describe(weight, &info));
  printf("%s: %s [%lld, %lld], %s\n", argv[2], info.format, (long long)info.k, (long long)info.n,
         info.scheme);

  float* x = malloc(info.k * sizeof(float));
  float* y = malloc(info.n * sizeof(float));
  for (int64_t i = 0; i < info.k; ++i) x[i] = 1;
  awqd_matmul_args args = AWQD_INIT(args);
  args.m = 1;
  args.x = x;
  args.y = y;
  args.x_dtype = args.y_dtype = AWQD_FP32;
  awqd_workspace workspace = {NULL, 0};
  check(awqd_matmul_workspace(weight, &args, &workspace.bytes));
  workspace.data = aligned_alloc(256, (workspace.bytes + 255) / 256 * 256);
  check(awqd_workspace_init(device, workspace, NULL));
  check(awqd_matmul(weight, &args, workspace, NULL));
  printf("y[0] = %g\n", y[0]);

  free(workspace.data);
  free(y);
  free(x);
  awqd_weight_free(weight);
  awqd_checkpoint_close(checkpoint);
  awqd_device_close(device);
  return 0;
}
