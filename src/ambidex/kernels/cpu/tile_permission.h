// Whether this process may use Intel's tile registers: they are 8 KiB a thread that the system has
// to save, so the processor, the system and the process's limits all have a say.
#pragma once

namespace ambidex {

// Whether the processor has them and the system would save them. Asks for nothing.
bool have_tiles();

// Asks the system to let all threads of this process use them, once; says whether they may. The
// first use without that ends a process.
bool permit_tiles();

}  // namespace ambidex
