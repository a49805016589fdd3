// What a rank of another version of agoq does until it knows that it is one.
#include <cstdio>

#include "comm/launch.h"
#include "comm/together.h"

int main(int argc, char** argv) {
  try {
    const agoq::Launch launch = agoq::launch_from_environment();
    agoq::meet(launch, argc > 1 ? argv[1] : "", 10);
    std::fprintf(stderr, "agoq: another version was not noticed\n");
    return 0;
  } catch (const agoq::AgreedError& error) {
    return error.kind() == agoq::ErrorKind::kInput ? 2 : 1;
  } catch (const agoq::Error& error) {
    std::fprintf(stderr, "agoq: %s\n", error.what());
    return 1;
  }
}
