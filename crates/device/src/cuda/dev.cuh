// helper B writes this
