"""How soon does data-parallel training get there, when peers are of unequal speed and come and go?"""
