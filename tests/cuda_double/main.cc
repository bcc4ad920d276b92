// Runs all tests, or those whose name contains the argument. The first thing that is wrong ends it.
#include <unistd.h>

#include "rig.h"

namespace cd = cuda_double;

int main(int argc, char** argv) {
    int num_run = 0;
    for (const auto& [name, test] : all_tests()) {
        if (argc > 1 && strstr(name, argv[1]) == nullptr) continue;
        printf("%s\n", name);
        fflush(stdout);
        cd::reset();
        alarm(60);  // a call that waits for a stream which nobody opens would wait for ever
        test();
        if (!cd::is_device_lost()) CHECK(cd::num_live_events() == 0 && cd::num_live_streams() == 0);
        ++num_run;
    }
    cd::reset();
    printf("%d passed\n", num_run);
    return num_run == 0;
}
