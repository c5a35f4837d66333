// Functions through which the vendor's checks read the mask register.
#pragma once

#include <cstdint>

uint64_t ModelFactoryGetMaskHigh();
uint64_t ModelFactoryGetMaskLow();
int ModelFactoryGetMaskMode();
